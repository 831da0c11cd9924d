"""Chunks of logits: how many rows or columns each has, and what the loss head's passes hold of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from .device_rules import device_rules, on_cpu

Pointwise = Sequence[Callable[[Tensor], Tensor]]

# elements of one chunk of logits: as many as the hidden states have, within these bounds (1 and 128 MiB in fp32). A sum
# over chunks is read and written once per chunk, or the weight is read once per chunk. On a GPU that takes as long as
# the products of a small chunk, so its chunks may be larger (512 MiB in 16 bits). They have 32 MiB at least: a chunk
# takes a dozen launches, and below that size the host needs longer for them than the GPU. Sizes depend on shapes and
# not on free memory: a step gives the same bits
MIN_CHUNK, MAX_CHUNK, MIN_DEVICE_CHUNK, MAX_DEVICE_CHUNK = 1 << 18, 1 << 25, 1 << 24, 1 << 28
# logits [K, V] of a trained head are kept to backward if they have at most so many bytes, and at most so many times
# the bytes of the weight's gradient [V, D], which the step needs anyway. Otherwise backward makes them again
KEPT_BYTES, KEPT_GRADIENTS = 1 << 28, 2
# chunks are whole tiles of a matrix product
ALIGNMENT = 16


def are_kept(rows: int, hidden: int, vocabulary: int, itemsize: int, budget: int = KEPT_BYTES) -> bool:
    """Whether a trained head keeps its logits to backward. Decided by shapes, so that each step has the same peak."""
    return rows * vocabulary * itemsize <= most_kept(hidden, vocabulary, itemsize, budget)


def most_kept(hidden: int, vocabulary: int, itemsize: int, budget: int = KEPT_BYTES) -> int:
    """The most bytes of logits that a trained head keeps to backward."""
    return min(budget, KEPT_GRADIENTS * hidden * vocabulary * itemsize)


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


def row_chunks(h: Tensor, vocabulary: int) -> Iterable[slice]:
    """Slices of the rows of h [K, D], for each of which logits [C, V] are made."""
    return chunks(h.size(0), vocabulary, h.numel(), bounds_of(h))


def row_pieces(x: Tensor) -> Iterable[slice]:
    """Slices of the rows of a chunk of logits x [C, V], of which copies in another dtype are made."""
    return chunks(x.size(0), x.size(1), 0, bounds_of(x))


def row_sizes(
    h: Tensor,
    weight: Tensor,
    pointwise: Pointwise,
    dtype: torch.dtype,
    logits: Tensor | None,
    rows: Tensor | None,
    scale: Tensor | None,
) -> list[int]:
    """Bytes that the forward holds besides its results: a chunk of logits, and what is made of a few of its rows."""
    columns = weight.size(0)
    count, few = (min(_step(columns, budget, bounds_of(h)), h.size(0)) for budget in (h.numel(), 0))
    x = h.new_empty((count, columns), device="meta")
    piece = x[:few]
    y = applied(pointwise, piece)
    held = [] if logits is not None and rows is None else [x]
    held += [new for new, old in ((y, piece), (y.to(dtype), y)) if new is not old]
    # the log-probabilities are as large as what they are computed from
    held.append(y.to(dtype))
    if (logits is None or scale is not None) and weight.dtype != h.dtype:
        held.append(weight.to("meta", h.dtype))
    return [tensor.nbytes for tensor in held]


def chunk_sizes(
    h: Tensor, weight: Tensor, pointwise: Pointwise, needs: tuple[bool, bool, bool], logits: Tensor | None = None
) -> list[int]:
    """Bytes that the backward holds besides its results: a chunk of logits and tensors made from it.

    Args:
        h: ``[K, D]``.
        weight: ``[V, D]``.
        pointwise: Functions that are applied to each chunk.
        needs: Which gradients are computed.
        logits: The kept logits, or None.
    """
    columns = min(_step(h.size(0), h.numel(), bounds_of(h)), weight.size(0))
    x = h.new_empty((h.size(0), columns), device="meta")
    y = applied(pointwise, x)
    # gradients have the same sizes; if no function is applied, the gradient is written over the logits
    held = [x.nbytes] if y is x else [x.nbytes, y.nbytes] * 2
    if logits is not None and y is not x:
        held = held[1:]  # x is a view of the kept logits
    part = columns * h.size(1) * h.itemsize
    return [*held, *[part] * ((weight.dtype != h.dtype) + bool(needs[1]))]
