"""What the registry knows about one live tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from .record import Recipe, Record, versions
from .views import dense, extent


class Entry:
    """One live tensor: its record (if it has one) and the derivations that its consumers share.

    Nothing here may hold the tensor itself, because an entry ends when its tensor dies.
    """

    __slots__ = ("copies", "derivations", "record", "shape", "stride", "tensor", "versions")

    def __init__(self, x: Tensor, record: Record | None, on_death: Callable[[Any], None]) -> None:
        self.tensor = weakref.ref(x, on_death)
        self.derivations: dict[Hashable, Recipe] = {}
        self.copies: dict[Hashable, Record] = {}
        self.describe(x, record)

    def describe(self, x: Tensor, record: Record | None) -> None:
        """Note that `record` gives the data as x sees it."""
        self.record = record
        self.shape, self.stride = x.shape, x.stride()
        self.versions = _versions(record)

    def describes(self, x: Tensor) -> bool:
        """Whether the record can give x, which has the same data as this tensor."""
        if self.record is None or self.versions != _versions(self.record):
            return False
        if x.shape == self.shape and x.stride() == self.stride:
            return True
        # The record gives a contiguous tensor with as many elements as this one. x can be made from it as a view if
        # this tensor has no gaps in memory, and if x reads nothing behind the last element.
        return dense(self.shape, self.stride) and extent(x) <= x.numel()


def _versions(record: Record | None) -> list[int]:
    return versions(record) if record is not None else []
