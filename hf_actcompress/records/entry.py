"""What the registry knows about one live tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .held import Made, check_versions
from .record import Derived, Recipe, Record, parts, versions
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

    def record_as(self, shape: torch.Size, stride: tuple[int, ...]) -> Record | None:
        """The record of this tensor, which has or had that shape; None if a source was modified since."""
        if self.record is None or self.versions != versions(self.record):
            return None
        if shape == self.shape and stride == self.stride:
            return self.record
        return Derived(Recipe(partial(viewed, shape=shape, stride=stride)), (self.record,))

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


class Noted:
    """Entries by the nodes that made their tensors. Of an output that is gone, if ops keep its sources anyway.

    Args:
        holds: Whether it may hold the tensors from which these are made.
    """

    def __init__(self, holds: bool) -> None:
        self._holds = holds
        # of each output: its entry, or a weak reference to it, or what is held for it; a weak reference to the output;
        # its shape, its strides and its version
        self._notes: dict[tuple[int, int], tuple[Any, Any, torch.Size, tuple[int, ...], int]] = {}
        # ids of what the entries are made of that are held
        self._held: set[int] = set()

    def note(
        self,
        y: Any,
        entry: Entry,
        kept: Iterable[Tensor | None] = (),
        held: Callable[[Record], Made | None] = lambda record: None,
    ) -> None:
        """Note the entry of y, the output of an op.

        Args:
            y: The output.
            entry: Its entry.
            kept: The tensors that the op keeps for its backward as they are.
            held: What is held for y, if all that y's record needs is held for the op's backward in some way.
        """
        if y.grad_fn is None:
            return
        known: Any = weakref.ref(entry)
        if self._holds and entry.record is not None:
            sources = {*map(id, parts(entry.record))} - self._held
            if sources <= {*map(id, kept)}:
                known = entry
                self._held |= sources
            elif (entry.shape, entry.stride) == (y.shape, y.stride()):
                known = held(entry.record) or known
        self._notes[y.grad_fn._sequence_nr(), y.output_nr] = known, entry.tensor, y.shape, y.stride(), y._version

    def record(self, node: Any, number: int) -> Record | Made | None:
        """The record of the output of a node with that number, or what is held for it; None if there is neither."""
        note = self._notes.get((node._sequence_nr(), number))
        if note is None:
            return None
        known, of, shape, stride, version = note
        entry = known() if isinstance(known, weakref.ref) else known
        if entry is None or ((y := of()) is not None and y._version != version):
            return None
        return entry if isinstance(entry, Made) else entry.record_as(shape, stride)

    def clear(self) -> None:
        """Forget all entries."""
        self._notes.clear()
        self._held.clear()
