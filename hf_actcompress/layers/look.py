"""What a layer is made of, which each call compares with what was there when its plan was made.

A call looks at attributes, children, hooks and functions, and reads no name of a model: whatever a layer's code may
branch on is compared. Every layer does it in every step, so it is a comparison of two lists.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Hashable, Iterator
from dataclasses import replace
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..codecs import IDENTITY
from ..codecs.table import CODECS
from ..modules.base import HOOKS, Settings, are_wanted, stock_type
from ..private_apis import hooks_on_every_module
from ..records import current
from ..roles import RUN_BY_PLANS

# what a module runs in place of its class's forward or call: `nn.Module.compile` sets the second, and so do reports
_INSTEAD = ("forward", "_compiled_call_impl")
_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (dict, list, tuple, set)
# stands for every codec that packs
_ANY = CODECS["int8"]
_VALUES = (torch.dtype, torch.device, torch.Size)
# what every module has and does not compute with
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_OWN = frozenset({"actcompress_proved", "_gradient_checkpointing_func", *_INSTEAD})
# the path of a module and the name of an attribute of it -> its value, as a part of a key
Attributes: TypeAlias = dict[tuple[str, str], Hashable]
# (the dictionary that holds a value, its name there, the value)
_Place = tuple[dict[str, Any], str, Any]


class _Plain:
    """A class whose objects have attributes and nothing else."""


class LayerLook:
    """A layer as it is now."""

    def __init__(self, layer: nn.Module) -> None:
        modules = list(layer.modules())
        found: list[_Place] = []
        for module in modules:
            found += [(module._modules, name, child) for name, child in module._modules.items()]
            # what stands in the place of the class's forward or call
            found += [(vars(module), name, vars(module).get(name)) for name in _INSTEAD if module is not layer]
            attributes = list(_attributes(module))
            found += [(vars(module), name, _copied(value)) for name, value in attributes]
            for _, held in attributes:
                if _has_attributes(held):
                    found += [(vars(held), name, _copied(value)) for name, value in vars(held).items()]
        for config in _configs(modules):
            found += [(vars(config), name, value) for name, value in vars(config).items() if type(value) in _PLAIN]
        kinds = dict.fromkeys(map(stock_type, modules))
        found += [(space, name, value) for kind in kinds for space, name, value in _called(kind)]
        self._kinds, self._forwards = list(kinds), [kind.forward for kind in kinds]
        # a parametrisation changes the class of a module
        self._modules, self._classes = modules, list(map(type, modules))
        # hooks on the layer itself run around its forward
        self._hooks = [vars(module)[name] for module in modules[1:] for name in HOOKS]
        self._replaced, self._called = (any(name in vars(module) for module in modules[1:]) for name in _INSTEAD)
        self._places, self._names, values = zip(*found, strict=True)
        self._values = list(values)

    def holds(self) -> bool:
        """Whether all is as it was."""
        if list(map(type, self._modules)) != self._classes:
            return False
        now = list(map(dict.get, self._places, self._names))
        return now == self._values and [kind.forward for kind in self._kinds] == self._forwards

    def can_run(self) -> bool:
        """Whether no hook inside wants to see a call, and no module's forward was replaced."""
        if self._replaced or (self._called and current.watcher is None) or hooks_on_every_module():
            return False
        return not any(self._hooks) or not any(map(are_wanted, self._hooks))


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The module's own attributes, without hooks, weights and children."""
    for name, value in vars(module).items():
        # the settings of a layer, or of one inside of it, hold its plans
        skipped = name in _OF_MODULES or name in _OWN or (isinstance(value, Settings) and value.role in RUN_BY_PLANS)
        if not skipped and not isinstance(value, (Tensor, nn.Module)):
            yield name, value


def _has_attributes(value: Any) -> bool:
    """Whether its attributes are all that there is of it, as of the processors of diffusers' attention."""
    kind: Any = type(value)
    plain = kind.__eq__ is object.__eq__ and kind.__basicsize__ == _Plain.__basicsize__
    return plain and hasattr(value, "__dict__") and not isinstance(value, nn.Module)


def _copied(value: Any) -> Any:
    return copy.copy(value) if type(value) in _CONTAINERS else value


def _configs(modules: list[nn.Module]) -> list[Any]:
    configs = (vars(module).get("config") for module in modules)
    return list(
        {id(config): config for config in configs if config is not None and hasattr(config, "__dict__")}.values()
    )


def _called(kind: type[nn.Module]) -> Iterator[_Place]:
    """The functions that the forward of a class finds in its file."""
    forward: Any = inspect.unwrap(kind.forward)
    code = getattr(forward, "__code__", None)
    for name in code.co_names if code is not None else ():
        value = forward.__globals__.get(name)
        if isinstance(value, FunctionType):
            yield forward.__globals__, name, value


class Same:
    """An object as a part of a key: equal to itself alone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def kind_of(layer: nn.Module, asked: tuple[bool, ...]) -> tuple[Hashable, Attributes]:
    """What makes two layers of one kind, and those of their attributes that may differ nevertheless.

    `asked` is what the layer's own settings decide about its plan.
    """
    found: list[Any] = [*asked]
    attributes: Attributes = {}
    tensors: dict[int, int] = {}
    modules = list(layer.modules())
    configs = _configs(modules)
    places = {id(config): i for i, config in enumerate(configs)}
    found += map(_config, configs)
    for kind in dict.fromkeys(map(stock_type, modules)):
        found += [(name, Same(value)) for _, name, value in _called(kind)]
    for path, module in layer.named_modules(remove_duplicate=False):
        found.append((path, stock_type(module) if module is layer else type(module), Same(stock_type(module).forward)))
        for name, value in _attributes(module):
            if id(value) in places:
                found.append((name, places[id(value)]))
            elif _may_differ(value):
                # each layer of the kind has one
                found.append(name)
                attributes[path, name] = _described(value)
            else:
                found.append((name, _described(value)))
        for held in (module._parameters, module._buffers):
            for name, x in held.items():
                shape = None if x is None else (x.shape, x.dtype, x.device, x.requires_grad, x.stride())
                number = None if x is None else tensors.setdefault(id(x), len(tensors))
                found.append((name, shape, number))
    return tuple(found), attributes


def _config(value: Any, depth: int = 2) -> Hashable:
    """A config and those in it, which are equal if their values are: copies of a model have copies of its config."""
    kind: Any = type(value)
    if depth == 0 or not hasattr(value, "__dict__") or kind.__eq__ is object.__eq__:
        return _described(value)
    return kind, tuple((name, _config(item, depth - 1)) for name, item in vars(value).items())


def _may_differ(value: Any) -> bool:
    """Whether layers of one kind may differ in an attribute: an index, a name, a state, if no code looks at it.

    Nobody sets a switch or a rate that no code reads, and settings are read outside of the layer's code.
    """
    return not (type(value) in (bool, float, type(None)) or isinstance(value, (*_VALUES, Settings)))


def _described(value: Any) -> Hashable:
    if type(value) in _PLAIN or isinstance(value, _VALUES):
        return type(value), value
    if isinstance(value, dict):
        return "dict", tuple((_described(name), _described(item)) for name, item in value.items())
    if type(value) in (list, tuple):
        return type(value), tuple(map(_described, value))
    if type(value) in (set, frozenset):
        return "set", frozenset(map(_described, value))
    if _has_attributes(value):
        return type(value), tuple((name, _only_plain(item)) for name, item in vars(value).items())
    # layers of one kind have equal settings, and an object for each
    return _settings(value) if isinstance(value, Settings) and _is_hashable(value) else Same(value)


def _settings(settings: Settings) -> Settings:
    """Settings that are equal for all codecs but the one that changes nothing: each layer runs a plan with its own."""
    return settings if settings.codec == IDENTITY else replace(settings, codec=_ANY)


def _only_plain(value: Any) -> Hashable:
    """`_described` without a look into objects, which may hold one another."""
    return _described(value) if type(value) in _PLAIN else Same(value)


def _is_hashable(settings: Settings) -> bool:
    try:
        hash(settings)
    except TypeError:
        return False
    return True
