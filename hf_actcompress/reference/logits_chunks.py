"""Chunks of logits: how many rows or columns each has, and what the loss head's passes hold of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from .device_rules import device_rules, on_cpu

Pointwise = Sequence[Callable[[Tensor], Tensor]]

# elements of one chunk of logits: as many as the hidden states have, within these bounds (1 and 128 MiB in fp32). A sum
# over chunks is read and written once per chunk. On a GPU that takes as long as the products of a small chunk, so its
# chunks may be larger (512 MiB in 16 bits). They have 8 MiB at least: a chunk takes a dozen launches, and below that
# size the host needs longer for them than the GPU. Sizes depend on shapes and not on free memory: a step gives the same
# bits
MIN_CHUNK, MAX_CHUNK, MIN_DEVICE_CHUNK, MAX_DEVICE_CHUNK = 1 << 18, 1 << 25, 1 << 22, 1 << 28
# chunks are whole tiles of a matrix product
ALIGNMENT = 16


def bounds_of(h: Tensor) -> tuple[int, int]:
    """The smallest and the largest number of elements of a chunk of the logits of h [K, D]."""
    if on_cpu(h):
        return MIN_CHUNK, MAX_CHUNK
    return MIN_DEVICE_CHUNK, max(MAX_CHUNK, min(h.numel(), MAX_DEVICE_CHUNK))


def _step(others: int, budget: int, bounds: tuple[int, int]) -> int:
    least, most = bounds
    return max(min(max(budget, least), most) // max(others, 1) // ALIGNMENT, 1) * ALIGNMENT


def chunks(total: int, others: int, budget: int, bounds: tuple[int, int] | None = None) -> Iterable[slice]:
    """Slices of `total` rows or columns, each with about `budget` elements; `others` is the size of the other side."""
    step = _step(others, budget, bounds or (MIN_CHUNK, MAX_CHUNK))
    every = [slice(start, min(start + step, total)) for start in range(0, total, step)]
    rules = device_rules()
    return every if rules is None else rules.parts(every)


def applied(pointwise: Pointwise, x: Tensor) -> Tensor:
    """The functions' result for a chunk of logits, one after the other."""
    for function in pointwise:
        x = function(x)
    return x


def whole_chunks(logits: Tensor, count: int) -> Iterable[slice]:
    """Slices of `count` rows of logits [M, V] that exist as a whole."""
    bounds = bounds_of(logits)[0], MAX_CHUNK
    return chunks(count, logits.size(1), logits.numel() // 32, bounds)


def whole_chunk_sizes(
    logits: Tensor, rows: Tensor | None, target: Tensor, pointwise: Pointwise, dtype: torch.dtype
) -> list[int]:
    """Bytes that `whole_fwd` holds besides its results: a chunk of logits, if it is not a view, and what it becomes."""
    first = next(iter(whole_chunks(logits, target.numel())), slice(0, 0))
    given = logits.new_empty((first.stop, logits.size(1)), device="meta")
    y = applied(pointwise, given)
    x = y.to(dtype)
    held = [given] if rows is not None else []
    held += [new for new, old in ((y, given), (x, y)) if new is not old]
    # the log-probabilities are as large as x
    return [chunk.nbytes for chunk in (*held, x)]


def chunk_sizes(
    h: Tensor, weight: Tensor, pointwise: Pointwise, needs: tuple[bool, bool, bool] | None = None
) -> list[int]:
    """Bytes of the tensors that these passes hold besides their results: a chunk of logits and tensors made from it.

    Args:
        h: ``[K, D]``.
        weight: ``[V, D]``.
        pointwise: Functions that are applied to each chunk.
        needs: Which gradients are computed; None for the forward.
    """
    columns = min(_step(h.size(0), h.numel(), bounds_of(h)), weight.size(0))
    x = h.new_empty((h.size(0), columns), device="meta")
    y = applied(pointwise, x)
    # gradients have the same sizes; if no function is applied, the gradient is written over the logits
    logits = [x.nbytes] if y is x else [x.nbytes, y.nbytes] * (1 if needs is None else 2)
    part = columns * h.size(1) * h.itemsize
    return [*logits, *[part] * ((weight.dtype != h.dtype) + bool(needs and needs[1]))]
