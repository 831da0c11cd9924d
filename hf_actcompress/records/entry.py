"""What the registry knows about one live tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from torch import Tensor

from .held import check_versions
from .record import Derived, Recipe, Record, versions
from .views import dense, extent, viewed


class Entry:
    """One live tensor: its record (if it has one) and the derivations that its consumers share.

    Nothing here may hold the tensor itself, because an entry ends when its tensor dies.
    """

    __slots__ = ("__weakref__", "copies", "derivations", "record", "shape", "stride", "tensor", "versions")

    def __init__(self, x: Tensor, record: Record | None, on_death: Callable[[Any], None]) -> None:
        self.tensor = weakref.ref(x, on_death)
        self.derivations: dict[Hashable, Recipe] = {}
        self.copies: dict[Hashable, Record] = {}
        self.describe(x, record)

    def describe(self, x: Tensor, record: Record | None) -> None:
        """Note that `record` gives the data as x sees it."""
        self.record = record
        self.shape, self.stride = x.shape, x.stride()
        self.versions = [] if record is None else versions(record)

    def seen_as(self, x: Tensor) -> Record | None:
        """The record as x sees the data: as many elements from the same offset on, perhaps in another shape or order.

        None if the record cannot give x.
        """
        if self.record is None or not self.describes(x):
            return None
        if x.shape == self.shape and x.stride() == self.stride:
            return self.record
        key = ("view", x.shape, x.stride())
        if key not in self.derivations:
            self.derivations[key] = Recipe(partial(viewed, shape=x.shape, stride=x.stride()))
        return Derived(self.derivations[key], (self.record,))

    def end(self, version: int) -> None:
        """Nothing is known any more of what is in the tensor. Who has saved its record gets what is in it now.

        Not after a write that autograd has seen, which stock forbids: it is at another version than the entry then.
        """
        y, record = self.tensor(), self.record
        if y is None or y._version != version:
            return
        if isinstance(record, Derived) and record.recipe.uses:
            order = y.detach().as_strided(self.shape, self.stride)
            record.recipe.recompute = partial(_as_it_is, order, y._version)

    def describes(self, x: Tensor) -> bool:
        """Whether the record can give x, which has the same data as this tensor."""
        if self.record is None or self.versions != versions(self.record):
            return False
        if x.shape == self.shape and x.stride() == self.stride:
            return True
        # The record gives a contiguous tensor with as many elements as this one. x can be made from it as a view if
        # this tensor has no gaps in memory, and if x reads nothing behind the last element.
        return dense(self.shape, self.stride) and extent(x) <= x.numel()


def _as_it_is(x: Tensor, version: int, *_: Tensor) -> Tensor:
    check_versions((x,), (version,))
    return x
