"""Whether a layer is still what it was when it was recorded. Each call of a layer checks it, so the check is cheap."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from types import FunctionType
from typing import Any

from torch import nn

from ..modules.base import HOOKS, are_wanted, own_attributes, stock_type
from ..ops.snapshot import MERGED, refuse_merges
from ..private_apis import as_in_first_run, hooks_on_every_module
from ..records import current
from .own_attention import UNREAD

# where PEFT keeps which adapters are on, and their factors
_ADAPTERS = ("_disable_adapters", "_active_adapter", MERGED, "scaling")
# what a module runs in place of its class's call: `nn.Module.compile` sets it, and so do reports for a moment
_CALL = "_compiled_call_impl"
# the attribute of a config that says which attention function is called
_ATTENTION = "_attn_implementation_internal"
# values of attributes that a module's code may read: rates of dropout, constants of norms and activations, caps
_PLAIN = (bool, float, int, str, type(None))


@dataclass
class Look:
    """What each call checks. Deep-copies and pickles with the layer.

    Attributes:
        children: Each module of the layer: the module that it is in, its name there, and itself.
        attributes: Modules and configs, names and values of attributes.
        functions: Classes of modules, and the names and values of functions that their code calls. Other libraries
            may exchange them, or the forward of the class.
        forwards: The forward of each of these classes.
        adapters: The modules that may merge an adapter into a weight.
    """

    children: list[tuple[nn.Module, str, nn.Module]]
    attributes: list[tuple[Any, str, Any]]
    functions: list[tuple[type[nn.Module], str, Any]]
    forwards: list[tuple[type[nn.Module], Any]]
    adapters: list[nn.Module]
    # the same as lists of dictionaries, names and values, which are fast to compare
    _fast: tuple[Any, ...] | None = None

    @classmethod
    def at(cls, layer: nn.Module) -> Look:
        attributes = [(module, *item) for module in layer.modules() for item in _read(module)]
        configs = {id(c): c for m in layer.modules() if (c := vars(m).get("config")) is not None}
        attributes += [(c, _ATTENTION, vars(c)[_ATTENTION]) for c in configs.values() if _ATTENTION in vars(c)]
        classes = dict.fromkeys(stock_type(module) for module in layer.modules())
        functions = [(kind, name, value) for kind in classes for name, value in _called(kind)]
        adapters = [module for module, name, _ in attributes if name == MERGED]
        forwards = [(kind, kind.forward) for kind in classes]
        return cls(list(_children(layer)), attributes, functions, forwards, adapters)

    def __getstate__(self) -> dict[str, Any]:
        # a copy looks its own modules up
        return {**self.__dict__, "_fast": None}

    def has_all_of(self, layer: nn.Module) -> bool:
        """Whether the layer has the modules that it had, and no others."""
        return [child for _, _, child in _children(layer)] == [child for _, _, child in self.children]

    def holds(self) -> bool:
        """Whether all modules are where they were and as they were, and no hook wants to see a call of one.

        Where a checkpointed region runs again, whether it was so in the first run: the program knows the modules as
        they were then.
        """
        return as_in_first_run(self, Look._holds)

    def _holds(self) -> bool:
        hooks, states, places, names, values = self._fast or self._prepared()
        if any([kind.forward is not forward for kind, forward in self.forwards]):
            return False
        if _hooked(hooks):
            return False
        if any(map(dict.get, states, repeat("forward"))):
            return False
        if current.watcher is None and any(map(dict.get, states, repeat(_CALL))):
            return False
        return values == list(map(dict.get, places, names))  # type: ignore[no-any-return]

    def refuse_merges(self, outputs: Any) -> None:
        """Let the backward of a layer that is computed again raise an error if an adapter has been merged by then."""
        refuse_merges(self.adapters, outputs)

    def _prepared(self) -> tuple[Any, ...]:
        states = [vars(child) for _, _, child in self.children]
        hooks = [state[name] for state in states for name in HOOKS]
        looks = [
            *((module._modules, name, child) for module, name, child in self.children),
            *((vars(module), name, value) for module, name, value in self.attributes),
            *((inspect.unwrap(kind.forward).__globals__, name, value) for kind, name, value in self.functions),
        ]
        places, names, values = zip(*looks, strict=True)
        self._fast = hooks, states, places, names, list(values)
        return self._fast


def _hooked(hooks: list[dict[int, Any]]) -> bool:
    return hooks_on_every_module() or (any(hooks) and any(map(are_wanted, hooks)))


def _read(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and values of the attributes that the module's code may read."""
    # the layer is recorded in training mode, whatever mode it is in now
    yield "training", True
    for name, value in own_attributes(module).items():
        public = name[0] != "_" and name not in UNREAD and isinstance(value, _PLAIN)
        if public or (name in _ADAPTERS and isinstance(value, (*_PLAIN, list, dict))):
            yield name, copy.copy(value)


def _children(layer: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for module in layer.modules():
        for name, child in module._modules.items():
            if child is not None:
                yield module, name, child


def _called(kind: type[nn.Module]) -> Iterator[tuple[str, Any]]:
    forward: Any = inspect.unwrap(kind.forward)
    code = getattr(forward, "__code__", None)
    for name in code.co_names if code is not None else ():
        value = forward.__globals__.get(name)
        if isinstance(value, FunctionType):
            yield name, value
