"""The parts of which the gradient of logits is the sum, and how some of their rows are computed.

Rows are always numbered as in the source, the head's own logits. A function of logits that left the model works row by
row, so its gradient at a row belongs to the source row that this row came from, whichever slices are in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .row_set import RowSet, Where, add_at, rows_at, shifted

# a function of rows, as a chain of functions
Steps = tuple[Callable[[Tensor], Tensor], ...]
# the logits [K, V] of some rows of the source
Read = Callable[[Where], Tensor]


class Times:
    """The step that multiplies by another function of the same rows."""

    __slots__ = ("other",)

    def __init__(self, other: Steps) -> None:
        self.other = other

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError("`Chunk.value` multiplies")


class Chunk:
    """Functions of some rows of the logits; each is computed once."""

    def __init__(self, read: Read) -> None:
        self.read = read
        self._made: dict[Any, Tensor] = {}

    def value(self, steps: Steps, rows: Where) -> Tensor:
        """The rows after the steps, without gradient."""
        key = (steps, rows.start, rows.stop) if isinstance(rows, slice) else None
        if key in self._made:
            return self._made[key]
        if not steps:
            y = self.read(rows)
        else:
            *before, last = steps
            x = self.value(tuple(before), rows)
            y = x * self.value(last.other, rows) if isinstance(last, Times) else last(x)
        if key is not None:
            self._made[key] = y
        return y


class GradientPart:
    """A gradient at the rows of the source from `start` to `stop`, zero elsewhere."""

    start: int
    stop: int
    dtype: torch.dtype

    def add_to(self, out: Tensor, first: int, chunk: Chunk) -> bool:
        """Add the gradient to out [K, V], the source's rows from `first` on; returns whether it has any of them."""
        raise NotImplementedError


class Leaf(GradientPart):
    """The gradient of one function. `gradient` gets a chunk, rows of the source, and their positions in `rows`."""

    def __init__(self, rows: RowSet, dtype: torch.dtype, gradient: Callable[[Chunk, Where, Where], Tensor]) -> None:
        self.rows, self.dtype, self.gradient = rows, dtype, gradient
        self.start, self.stop = rows.start, rows.stop

    def add_to(self, out: Tensor, first: int, chunk: Chunk) -> bool:
        found = self.rows.within(first, first + out.size(0))
        if found is None:
            return False
        own, rows = found
        add_at(out, shifted(rows, first), self.gradient(chunk, rows, own))
        return True


def rows_of(dy: Tensor) -> Callable[[Chunk, Where, Where], Tensor]:
    """The gradient function of a `Leaf` whose gradient has the values dy [..., V]."""
    flat = dy.reshape(-1, dy.size(-1))
    return lambda chunk, rows, own: rows_at(flat, own)


class Total(GradientPart):
    """The sum of several parts."""

    def __init__(self, parts: Sequence[GradientPart]) -> None:
        self.parts = parts
        self.start, self.stop = min(part.start for part in parts), max(part.stop for part in parts)
        self.dtype = parts[0].dtype

    def add_to(self, out: Tensor, first: int, chunk: Chunk) -> bool:
        # a list, because `any` of a generator would stop at the first part that adds something
        return any([part.add_to(out, first, chunk) for part in self.parts])


class Mapped(GradientPart):
    """A linear function of the gradient of each row. It is defined for `rows` only; None: for all rows."""

    def __init__(
        self,
        part: GradientPart,
        function: Callable[[Tensor, Chunk, Where], Tensor],
        dtype: torch.dtype,
        rows: RowSet | None,
    ) -> None:
        self.part, self.function, self.dtype, self.rows = part, function, dtype, rows
        self.start, self.stop = part.start, part.stop

    def add_to(self, out: Tensor, first: int, chunk: Chunk) -> bool:
        begin, end = max(first, self.start), min(first + out.size(0), self.stop)
        if begin >= end:
            return False
        dy = out.new_zeros((end - begin, out.size(1)), dtype=self.part.dtype)
        if not self.part.add_to(dy, begin, chunk):
            return False
        found = (slice(0), slice(begin, end)) if self.rows is None else self.rows.within(begin, end)
        assert found is not None
        rows = found[1]
        add_at(out, shifted(rows, first), self.function(rows_at(dy, shifted(rows, begin)), chunk, rows))
        return True
