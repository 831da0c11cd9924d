"""`RowSet`: a choice of rows of a matrix. It is known on the host, so that choosing among them waits for no device."""

from __future__ import annotations

import torch
from torch import Tensor

# rows of a tensor: a slice if they are consecutive
Where = slice | Tensor


class RowSet:
    """Some of the rows of a matrix, in an order: number k of the set is row ``index[k]``.

    Args:
        index: ``[K]`` int64 on the CPU, no number twice.
    """

    __slots__ = ("ascending", "index", "start", "stop")

    def __init__(self, index: Tensor) -> None:
        # None: all from start to stop, in order
        self.index: Tensor | None = None
        self.ascending, self.start, self.stop = True, 0, 0
        if index.numel() == 0:
            return
        self.ascending = bool((index.diff() > 0).all())
        self.start, self.stop = int(index.min()), int(index.max()) + 1
        if not (self.ascending and self.stop - self.start == index.numel()):
            self.index = index.contiguous()

    def within(self, first: int, last: int) -> tuple[Where, Where] | None:
        """The set's rows in ``[first, last)``: their positions in the set, their numbers; None if there are none."""
        first, last = max(first, self.start), min(last, self.stop)
        if first >= last:
            return None
        if self.index is None:
            return slice(first - self.start, last - self.start), slice(first, last)
        if self.ascending:
            low, high = torch.searchsorted(self.index, torch.tensor([first, last])).tolist()
            own: Where = slice(low, high)
            rows = self.index[low:high]
        else:
            own = ((self.index >= first) & (self.index < last)).nonzero()[:, 0]
            rows = self.index[own]
        return (own, as_slice(rows)) if rows.numel() else None

    def part(self, numbers: slice) -> Where:
        """The rows of the matrix that are at some positions of the set."""
        if self.index is None:
            return slice(self.start + numbers.start, self.start + numbers.stop)
        return as_slice(self.index[numbers])


def as_slice(rows: Tensor) -> Where:
    """Row numbers [K] as a slice if they are consecutive, else unchanged."""
    first = int(rows[0])
    follow = torch.equal(rows, torch.arange(first, first + rows.numel()))
    return slice(first, first + rows.numel()) if follow else rows


def shifted(where: Where, by: int) -> Where:
    """The same rows, counted from row `by` on."""
    if isinstance(where, slice):
        return slice(where.start - by, where.stop - by)
    return where - by


def rows_at(x: Tensor, where: Where) -> Tensor:
    """x[where] along the first dimension; a view for a slice."""
    return x[where] if isinstance(where, slice) else x.index_select(0, _on(where, x))


def add_at(out: Tensor, where: Where, x: Tensor) -> None:
    """out[where] += x along the first dimension; no row occurs twice in `where`."""
    if isinstance(where, slice):
        out[where].add_(x)
    else:
        out.index_add_(0, _on(where, out), x.to(out.dtype))


def _on(rows: Tensor, x: Tensor) -> Tensor:
    """The row numbers on x's device; the host does not wait until they are there."""
    return rows.to(x.device, non_blocking=True)
