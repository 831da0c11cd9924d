"""An integer attribute of a layer, such as its index, that notes whether the layer's code looks at it.

A layer's code may hand its index on, to a cache or to attention, without looking at it: then layers of all indices run
one plan. If it compares the index, computes with it, or gives it to torch, each index has a plan.
"""

from __future__ import annotations

from typing import Any


class Number:
    """Stands in the place of an integer while a layer is traced."""

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
