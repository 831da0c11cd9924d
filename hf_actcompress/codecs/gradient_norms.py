"""How large the gradient of each token of each sample was the last time, for those who sample tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# added to every norm, of the mean: a token whose gradient was zero then may have one now, and has to be drawn at times
_FLOOR = 0.1


class SiteNorms:
    """Norms of dy [samples, positions] at one place of a model, on the host, in fp32.

    What is in it is of consequence to the variance of an estimate alone: it never depends on the draw that it steers.
    """

    def __init__(self, samples: int, positions: int) -> None:
        self.squares = torch.zeros(samples, positions)
        self.seen = torch.zeros(samples, dtype=torch.bool)
        # samples of a batch that is being used: the next gradient is the first of theirs, others are added
        self.awaited = torch.zeros(samples, dtype=torch.bool)

    def fits(self, rows: int, samples: Tensor) -> bool:
        """Whether `rows` tokens are whole sequences of these samples [B]."""
        return rows % len(samples) == 0 and rows // len(samples) <= self.squares.size(1)

    def expect(self, rows: int, samples: Tensor) -> Tensor:
        """What to multiply the norms of x [rows] by; for samples that were not here yet the mean of those that were."""
        self.awaited[samples] = True
        norms, seen = self.squares[samples, : rows // len(samples)].sqrt(), self.seen[samples]
        if not seen.any():
            return torch.ones(rows)
        mean = norms[seen].mean()
        norms = torch.where(seen.unsqueeze(1), norms, mean) + _FLOOR * mean
        return norms.flatten() if float(mean) > 0 else torch.ones(rows)

    def note(self, dy: Tensor, samples: Tensor) -> None:
        """Add the squares of dy [rows, O] to those of the other consumers of the same x."""
        wide = torch.promote_types(dy.dtype, torch.float32)
        norms = torch.linalg.vector_norm(dy, dim=1, dtype=wide).float().cpu()
        squares = norms.square().view(len(samples), -1)
        fresh, positions = self.awaited[samples], squares.size(1)
        before = self.squares[samples, :positions].masked_fill(fresh.unsqueeze(1), 0)
        # of a batch with loss scaling that overflowed, nothing is learnt
        self.squares[samples, :positions] = torch.where(squares.isfinite(), before + squares, before)
        self.awaited[samples], self.seen[samples] = False, True


class _State(threading.local):
    def __init__(self) -> None:
        self.samples: Tensor | None = None


_state = _State()


@contextmanager
def samples_are(samples: Tensor) -> Iterator[None]:
    """While the block runs in this thread, the sequences of a batch are these samples [B], int64."""
    before, _state.samples = _state.samples, samples.cpu()
    try:
        yield
    finally:
        _state.samples = before


def samples_now() -> Tensor | None:
    """The samples of the batch in the forward in progress, on the host, or None."""
    return _state.samples
