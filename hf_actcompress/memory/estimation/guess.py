"""Which batch may be the largest that fits, out of one step: where a search for it looks next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from .extrapolation import Extrapolated

# bytes of an element in which a weight is cast, or has a gradient
_WIDTHS = (1, 2, 4)


def largest_batch(found: Extrapolated, batch_size: int, room: int, weights: Iterable[Tensor]) -> int | None:
    """The batch for which the peak of a step is about `room` bytes; None if the step says nothing.

    What is as large as a weight is taken for its gradient or a copy of it, and stays; all else grows with the batch.

    Args:
        found: The step of a batch of `batch_size`.
        batch_size: Sequences.
        room: For the step, beside all states.
        weights: Of the model.
    """
    sizes = {width * weight.numel() for weight in weights for width in _WIDTHS}
    fits = [(room - fixed) * batch_size // growing for fixed, growing in _moments(found, sizes) if growing > 0]
    return max(1, min(fits)) if fits else None


def _moments(found: Extrapolated, sizes: set[int]) -> Iterator[tuple[int, int]]:
    """What is alive at each allocation of the whole model: what stays, and what grows with the batch."""
    base = found.base
    if base is None or base.history is None:
        return
    fixed, done = 0, 0
    for at, (live, mark) in enumerate(zip((*base.forward, *base.backward), base.history.marks, strict=True)):
        fixed += sum(size for size in base.history.changes[done:mark] if abs(size) in sizes)
        done = mark
        more = sum(times * growth.on_top(base, at) for growth, times in found.more)
        yield fixed, live - fixed + more
