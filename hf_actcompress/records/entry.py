"""What the registry knows about one live tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from .parts import is_part
from .record import Derived, Recipe, Record, tensors, versions
from .views import View, dense, extent


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

    def sources(self) -> list[Tensor]:
        """The tensors that the record is made of."""
        return [] if self.record is None else tensors(self.record)

    def record_as(self, shape: torch.Size, stride: tuple[int, ...]) -> Record | None:
        """The record of this tensor, which has or had that shape; None if a source was modified since."""
        if self.record is None or self.versions != _versions(self.record):
            return None
        if shape == self.shape and stride == self.stride:
            return self.record
        return Derived(Recipe(View(shape, stride)), (self.record,))

    def describes(self, x: Tensor) -> bool:
        """Whether the record can give x, which has the same data as this tensor."""
        if self.record is None or self.versions != _versions(self.record):
            return False
        if x.shape == self.shape and x.stride() == self.stride:
            return True
        # The record gives a contiguous tensor with as many elements as this one. x can be made from it as a view if
        # this tensor has no gaps in memory, and if x reads nothing behind the last element.
        return dense(self.shape, self.stride) and extent(x) <= x.numel()


class Noted:
    """Entries by the nodes that made their tensors, which may be gone.

    Args:
        holds: Whether it may hold the tensors from which these are made.
    """

    def __init__(self, holds: bool) -> None:
        self._holds = holds
        self._entries: dict[tuple[int, int], tuple[Entry, torch.Size, tuple[int, ...]]] = {}

    def note(self, y: Any, entry: Entry) -> None:
        """Note the entry of y. Not if that would hold a part of a tensor, and with it the whole."""
        if self._holds and y.grad_fn is not None and not any(map(is_part, entry.sources())):
            self._entries[y.grad_fn._sequence_nr(), y.output_nr] = entry, y.shape, y.stride()

    def record(self, node: Any, number: int) -> Record | None:
        """The record of the output of a node with that number; None if there is none."""
        found = self._entries.get((node._sequence_nr(), number))
        return None if found is None else found[0].record_as(found[1], found[2])

    def clear(self) -> None:
        """Forget all entries."""
        self._entries.clear()


def _versions(record: Record | None) -> list[int]:
    return versions(record) if record is not None else []
