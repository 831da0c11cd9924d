"""Guesses the largest batch that fits from one step, as the next point for a search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from .extrapolation import Extrapolated

# bytes per element of the dtypes that a weight is cast to or has its gradient in, beside its own
_WIDTHS = (2, 4)


def widths(weights: Iterable[Tensor]) -> frozenset[int]:
    """The bytes of each weight, of its gradient, and of its copies in other dtypes."""
    return frozenset(size * weight.numel() for weight in weights for size in (weight.element_size(), *_WIDTHS))


def largest_batch(found: Extrapolated, batch_size: int, room: int, sizes: frozenset[int]) -> int | None:
    """The batch for which the peak of a step is about `room` bytes; None if the step does not tell.

    An allocation as large as a weight is taken to be its gradient or a copy of it, and does not depend on the batch;
    all others grow with the batch.

    Args:
        found: The step of a batch of `batch_size`.
        batch_size: Number of sequences.
        room: Bytes for the step, beside all states.
        sizes: The model's `widths`.
    """
    fits = [(room - fixed) * batch_size // growing for fixed, growing in _moments(found, sizes) if growing > 0]
    return max(1, min(fits)) if fits else None


def _moments(found: Extrapolated, sizes: frozenset[int]) -> Iterator[tuple[int, int]]:
    """The live bytes at each allocation of the whole model: the fixed ones, and those that grow with the batch."""
    base = found.base
    if base is None or base.history is None:
        return
    fixed, done = 0, 0
    for at, (live, mark) in enumerate(zip((*base.forward, *base.backward), base.history.marks, strict=True)):
        fixed += sum(size for size in base.history.changes[done:mark] if abs(size) in sizes)
        done = mark
        more = sum(times * growth.on_top(base, at) for growth, times in found.more)
        yield fixed, live - fixed + more
