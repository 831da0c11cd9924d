"""Norms of each token's gradient from when its sample came last; codecs that sample tokens draw by them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

# share of the mean that is added to every norm: a token whose gradient was zero may have one now, so it must be drawn
_FLOOR = 0.1


class SiteNorms:
    """Norms of dy [samples, positions] at one place of a model, on the host, in fp32.

    The norms change the variance of an estimated gradient, and never its mean: they do not depend on the draw that they
    steer.
    """

    def __init__(self, samples: int, positions: int) -> None:
        self.squares = torch.zeros(samples, positions)
        self.seen = torch.zeros(samples, dtype=torch.bool)
        # the samples whose next gradient replaces their stored squares; gradients after it are added
        self.awaited = torch.zeros(samples, dtype=torch.bool)

    def fits(self, rows: int, samples: Tensor) -> bool:
        """Whether `rows` tokens are whole sequences of these samples [B]."""
        return rows % len(samples) == 0 and rows // len(samples) <= self.squares.size(1)

    def expect(self, rows: int, samples: Tensor) -> Tensor:
        """Factors [rows] for the norms of x. Samples that are new get the mean of those that are known."""
        self.awaited[samples] = True
        return _factors(self.squares[samples, : rows // len(samples)].sqrt(), self.seen[samples])

    def note(self, dy: Tensor, samples: Tensor) -> None:
        """Add the squares of dy [rows, O] to those of the other consumers of the same x."""
        wide = torch.promote_types(dy.dtype, torch.float32)
        norms = torch.linalg.vector_norm(dy, dim=1, dtype=wide).float().cpu()
        squares = norms.square().view(len(samples), -1)
        fresh, positions = self.awaited[samples], squares.size(1)
        before = self.squares[samples, :positions].masked_fill(fresh.unsqueeze(1), 0)
        # nothing is learnt from a batch whose loss scaling has overflowed
        self.squares[samples, :positions] = torch.where(squares.isfinite(), before + squares, before)
        self.awaited[samples], self.seen[samples] = False, True


def _factors(norms: Tensor, seen: Tensor) -> Tensor:
    """Norms [B, T] as factors [B T]; for the samples [B] that were not `seen` the mean of the others."""
    if not seen.any():
        return torch.ones(norms.numel())
    mean = norms[seen].mean()
    norms = torch.where(seen.unsqueeze(1), norms, mean) + _FLOOR * mean
    return norms.flatten() if float(mean) > 0 else torch.ones(norms.numel())


class RememberedNorms(SiteNorms):
    """Norms of the last `capacity` samples that came, which are told apart by numbers such as hashes.

    It grows in backward, by 4 bytes per sample and position on the host. A copy (deepcopy, pickle) starts empty: it
    belongs to another training, for which these norms mean nothing.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(0, 0)
        self.capacity = capacity
        # number of a sample -> its row; the numbers of the rows, and how many were ever given a row
        self._row: dict[int, int] = {}
        self._numbers: list[int] = []
        self._given = 0

    def __reduce__(self) -> tuple[type[RememberedNorms], tuple[int]]:
        return RememberedNorms, (self.capacity,)

    def fits(self, rows: int, samples: Tensor) -> bool:
        return rows % len(samples) == 0

    def expect(self, rows: int, samples: Tensor) -> Tensor:
        at = torch.tensor([self._row.get(number, -1) for number in samples.tolist()])
        known = at >= 0
        self.awaited[at[known]] = True
        norms = torch.zeros(len(samples), rows // len(samples))
        before = self.squares[at[known], : norms.size(1)].sqrt()
        norms[known, : before.size(1)] = before
        return _factors(norms, known)

    def note(self, dy: Tensor, samples: Tensor) -> None:
        at = torch.tensor([self._row_of(number) for number in samples.tolist()])
        self._grow(dy.size(0) // len(samples))
        super().note(dy, at)

    def _row_of(self, number: int) -> int:
        """The row of a sample. A new sample gets the next free row; if none is free, the row of the oldest sample."""
        if number not in self._row:
            row = self._given % self.capacity
            self._given += 1
            if row < len(self._numbers):
                del self._row[self._numbers[row]]
                self._numbers[row] = number
                self.awaited[row] = True
            else:
                self._numbers.append(number)
            self._row[number] = row
        return self._row[number]

    def _grow(self, positions: int) -> None:
        rows, columns = self.squares.shape
        wanted = rows if len(self._numbers) <= rows else min(self.capacity, max(2 * rows, len(self._numbers)))
        if wanted == rows and positions <= columns:
            return
        pad = torch.nn.functional.pad
        self.squares = pad(self.squares, (0, max(positions - columns, 0), 0, wanted - rows))
        self.seen = pad(self.seen, (0, wanted - rows))
        # the first gradient of a row is the first of its sample
        self.awaited = pad(self.awaited, (0, wanted - rows), value=True)


_samples: ContextVar[Tensor | None] = ContextVar("samples", default=None)


@contextmanager
def samples_are(samples: Tensor) -> Iterator[None]:
    """While the block runs in this thread, the sequences of a batch are these samples [B], int64."""
    token = _samples.set(samples.cpu())
    try:
        yield
    finally:
        _samples.reset(token)


def samples_now() -> Tensor | None:
    """The samples of the batch in the forward in progress, on the host, or None."""
    return _samples.get()
