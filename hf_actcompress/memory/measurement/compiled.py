"""What a model with compiled modules keeps: their graphs are compiled once more, by a backend that can be watched."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ...compilation.observation import observed

# the attribute that `nn.Module.compile` sets; `nn.Module.__call__` then calls it in place of `_call_impl`
CALL = "_compiled_call_impl"


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that `torch.compile(module)` has wrapped, or the model itself."""
    inner = model.__dict__.get("_modules", {}).get("_orig_mod")
    return inner if isinstance(inner, nn.Module) else model


def compiled_modules(model: nn.Module) -> list[nn.Module]:
    """The outermost modules of the model that are compiled when they are called."""
    if uncompiled(model) is not model:
        return [uncompiled(model)]
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module.__dict__.get(CALL) is not None and module not in inside:
            found.append(module)
            inside.update(module.modules())
    return found


class Names:
    """For each living tensor that has left a compiled forward, the module that reads it."""

    def __init__(self) -> None:
        self._modules: dict[int, tuple[str, weakref.ref[Any]]] = {}

    def fused(self) -> AbstractContextManager[object]:
        return nullcontext()

    def returned(self, x: Tensor, module: str) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        self._modules[key] = module, weakref.ref(storage, lambda gone: self._forget(key, gone))

    def _forget(self, key: int, gone: weakref.ref[Any]) -> None:
        if key in self._modules and self._modules[key][1] is gone:
            del self._modules[key]

    def module_of(self, x: Tensor) -> str | None:
        """The module that reads x; None if x has left no compiled forward."""
        return self._modules.get(x.untyped_storage()._cdata, (None, None))[0]


@contextmanager
def watched(model: nn.Module, compiled: list[nn.Module]) -> Iterator[Names]:
    """While the block runs, these modules run Inductor's graphs op by op, which keep the same as its generated code."""
    names = Names()
    backend = observed(model, names)
    with calls_exchanged(compiled):
        for module in compiled:
            call = of_its_own_code(module._call_impl)
            module.__dict__[CALL] = torch.compile(call, backend=backend, dynamic=False)
        yield names


def of_its_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `function`, with a code object that no other has.

    torch stores compiled graphs by the code object that was called, and stops compiling a code object that has too many
    graphs. So the graphs traced here neither count among those of the user's own model, nor outlive the function.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return FunctionType(call.__code__.replace(), globals(), call.__name__, None, call.__closure__)


@contextmanager
def calls_exchanged(modules: Iterable[nn.Module]) -> Iterator[None]:
    """While the block runs, these modules are not compiled, unless the block sets compiled calls itself."""
    before = [(module, module.__dict__.get(CALL)) for module in modules]
    try:
        for module, _ in before:
            module.__dict__.pop(CALL, None)
        yield
    finally:
        for module, call in before:
            module.__dict__.pop(CALL, None)
            if call is not None:
                module.__dict__[CALL] = call
