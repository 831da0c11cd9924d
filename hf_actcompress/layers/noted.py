"""Attributes that differ between layers of one kind, and whether a layer's code looks at them.

A layer's code may hand its index on, to a cache or to attention, without looking at it, and may never read what a
library has stored in each layer, such as the layer's name or FSDP's state: then all of these layers run one plan. Each
value that the code looks at has plans of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..ops.snapshot import Snapshot

# the first part of the place of an integer that is an argument of the call; the second is its number
ARGUMENT = "="


class Number:
    """Stands in the place of an integer while a layer is traced: code that compares it, computes with it or gives it to
    torch looks at it."""

    def __init__(self, value: int) -> None:
        self.value, self.used = value, False

    def _look(self) -> int:
        self.used = True
        return self.value


def _looking(name: str) -> Any:
    def look(self: Number, *others: Any) -> Any:
        plain = [other._look() if isinstance(other, Number) else other for other in others]
        return getattr(int, name)(self._look(), *plain)

    return look


for _name in (
    "__abs__", "__add__", "__and__", "__bool__", "__divmod__", "__eq__", "__float__", "__floordiv__", "__format__",
    "__ge__", "__gt__", "__hash__", "__index__", "__int__", "__le__", "__lt__", "__mod__", "__mul__", "__ne__",
    "__neg__", "__or__", "__pow__", "__radd__", "__rfloordiv__", "__rmod__", "__rmul__", "__rsub__", "__rtruediv__",
    "__str__", "__repr__", "__sub__", "__truediv__", "__xor__",
):  # fmt: skip
    setattr(Number, _name, _looking(_name))


class Data:
    """Notes whether code reads an attribute of a module: a string, a container, or an object."""

    def __init__(self, name: str) -> None:
        self.name, self.used = name, False

    def read(self, module: nn.Module) -> Any:
        """The attribute of a module."""
        self.used = True
        return vars(module)[self.name]


def class_with(kind: Any, noted: Iterable[Data]) -> Any:
    """A subclass of a module's class whose objects note in `noted` which attributes are read."""
    found: Any = type(kind)(kind.__name__, (kind,), {"__module__": kind.__module__})
    # a class of transformers wraps the forward of each of its subclasses; that of `kind` is wrapped already
    for name in [name for name in vars(found) if not name.startswith("__")]:
        delattr(found, name)
    for data in noted:
        setattr(found, data.name, property(data.read))
    return found


def noted_in(
    snapshot: Snapshot, layer: nn.Module, places: set[tuple[str, str]]
) -> dict[tuple[str, str], Number | Data]:
    """Let attributes note who looks at them."""
    modules = dict(layer.named_modules(remove_duplicate=False))
    noted: dict[tuple[str, str], Number | Data] = {}
    read: dict[nn.Module, list[Data]] = {}
    for path, name in places:
        module = modules[path]
        value = vars(module)[name]
        if type(value) is int:
            noted[path, name] = number = Number(value)
            snapshot.replace(module, name, number)
        else:
            noted[path, name] = data = Data(name)
            read.setdefault(module, []).append(data)
    for module, attributes in read.items():
        snapshot.replace_class(module, class_with(type(module), attributes))
    return noted
