"""Patched modules whose own code runs again in backward while their linear layers do not: see records/selective.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..ops.autocast import SameAutocast, autocast_dtype
from ..records import Forward, current, run_selectively
from .base import ModuleMixin, PatchedModule, Settings, has_hooks, recording, settings_of

# patched modules with their classes and settings; the first one is the module that runs again
_Parts = list[tuple[Any, type, Settings | None]]
_DIFFERS = "a second run of its forward did not give what the first gave: it keeps what stock keeps"


def recalled(x: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    """What a linear layer computes from x; in the second run of a module, what the layer returned in the first run."""
    call = None if torch.compiler.is_compiling() else current.call
    return compute() if call is None else call.linear(x, compute)


class SelectiveMixin(ModuleMixin):
    """A module with code of its own between its linear layers, such as eager attention or a state-space scan."""

    # (args, kwargs) -> the keywords that a second run gets in place of the first one's; None if it must not run again
    kwargs_again: Callable[..., dict[str, Any] | None]
    # the second run: the stock forward with what `kwargs_again` has returned
    run_again: Callable[..., Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        settings = self.actcompress
        if settings is None or torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        stock = self.stock_forward()
        if current.net is None:
            return stock(*args, **kwargs)
        x = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.is_floating_point()), None)
        again = self.kwargs_again(args, kwargs)
        if x is None or again is None or not recording(x) or any(map(has_hooks, self._modules.values())):
            return stock(*args, **kwargs)
        proved: dict[Any, bool] = self.__dict__.setdefault("actcompress_proved", {})
        kind = (x.dtype, autocast_dtype(x), self.training, *_kinds(args), *kwargs, *_kinds(tuple(kwargs.values())))
        parts = [(part, type(part), part.actcompress) for part in self.modules() if isinstance(part, PatchedModule)]
        run_again = partial(_undone, self, partial(_as_patched, parts, partial(self.run_again, stock)))
        out = run_selectively(Forward(stock, SameAutocast(run_again, x), again, proved, kind), args, kwargs)
        if not settings.note and not all(proved.values()):
            self.__dict__["actcompress"] = replace(settings, note=_DIFFERS)
        return out


def _undone(module: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``run(*args, **kwargs)``, after which the module has the attributes again that it had before.

    A model may read in them what the first run has left, such as keys for a later layer.
    """
    attributes: dict[str, Any] = module.__dict__
    before = attributes.copy()
    try:
        return run(*args, **kwargs)
    finally:
        for name in attributes.keys() - before.keys():
            del attributes[name]
        attributes.update(before)


def _as_patched(parts: _Parts, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``run(*args, **kwargs)`` with the patches of the first run, which may have been removed before backward.

    Unpatched linear layers would compute, and save, what the first run did not.
    """
    if settings_of(parts[0][0]) is parts[0][2]:
        return run(*args, **kwargs)
    before = [(module, type(module), module.__dict__.get("actcompress")) for module, _, _ in parts]
    _set(parts)
    try:
        return run(*args, **kwargs)
    finally:
        _set(before)


def _set(parts: _Parts) -> None:
    for module, cls, settings in parts:
        module.__class__ = cls
        module.__dict__.pop("actcompress", None)
        if settings is not None:
            module.__dict__["actcompress"] = settings


def _kinds(values: tuple[Any, ...]) -> list[str]:
    return [type(value).__name__ for value in values]
