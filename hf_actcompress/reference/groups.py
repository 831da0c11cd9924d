"""Groups of neighbouring features that share a scale, and the rows of a tensor a few at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .device_rules import device_rules

# elements that are widened to the work dtype at once: a CPU's cache, a small part of a GPU's memory
_CHUNK = {"cpu": 1 << 18}
CHUNK_ELSEWHERE = 1 << 24


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows_features(x: Tensor) -> tuple[int, int]:
    """(R, D) of x [..., D]; a scalar is one row of one feature."""
    # not `Size.numel`, which a compiler that traces for any size takes for a number
    return (math.prod(x.shape[:-1]), x.size(-1)) if x.dim() else (1, 1)


def group_count(features: int, group_size: int) -> int:
    return -(-features // group_size)


def spans(features: int, group_size: int) -> list[tuple[int, int, int]]:
    """(start, stop, size of each group) of the features in whole groups, then of the shorter last group."""
    whole = features // group_size * group_size
    out = [(0, whole, group_size)] if whole else []
    return [*out, (whole, features, features - whole)] if whole < features else out


def in_groups(rows: Tensor, size: int) -> Tensor:
    """[r, n size] as [r, n, size], a view."""
    return torch.unflatten(rows, 1, (rows.size(1) // size, size))


def chunk_rows(features: int, device: torch.device) -> int:
    """How many rows of that many features to work on at once."""
    if torch.compiler.is_compiling():
        # the compiler fuses; a loop would only be unrolled
        return torch.iinfo(torch.int64).max
    rules = device_rules()
    elsewhere = rules is not None and not rules.on_cpu
    chunk = CHUNK_ELSEWHERE if elsewhere else _CHUNK.get(device.type, CHUNK_ELSEWHERE)
    return max(1, chunk // max(features, 1))


def chunk_starts(count: int, step: int) -> Sequence[int]:
    """Where the chunks of `count` things begin. An estimate leaves out most turns of a loop."""
    starts, rules = range(0, count, step), device_rules()
    return starts if rules is None else rules.turns(starts)


def is_one_chunk(x: Tensor) -> bool:
    """Whether `row_chunks` would hand out all of x at once."""
    if x.dim() < 2 or not x.numel() or torch.compiler.is_compiling():
        return False
    return x.numel() // x.size(-1) <= chunk_rows(x.size(-1), x.device)


def row_chunks(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The rows of x [..., D] in order, a few at a time: (their slice, [r, D]). No copy of x as a whole is made."""
    if x.numel() == 0:
        return
    x = x.unsqueeze(0) if x.dim() == 0 else x
    if torch.compiler.is_compiling():
        # a loop over rows would hold for this number of rows alone
        yield slice(None), x.reshape(-1, x.size(-1))
        return
    features, start = x.size(-1), 0
    # q, k and v are transposed views that do not flatten: one sequence of them is copied at a time
    for part in (x,) if x.is_contiguous() or x.dim() <= 2 else x.unbind(0):
        rows = part.reshape(-1, features)
        step = min(chunk_rows(features, x.device), rows.size(0))
        for first in chunk_starts(rows.size(0), step):
            chunk = rows[first : first + step]
            yield slice(start, start + chunk.size(0)), chunk
            start += chunk.size(0)


def row_slices(rows: int, features: int, device: torch.device) -> Iterator[slice]:
    """The same for a tensor that is about to be made."""
    if torch.compiler.is_compiling():
        yield slice(None)
        return
    step = min(chunk_rows(features, device), max(rows, 1))
    for start in chunk_starts(rows, step):
        yield slice(start, min(start + step, rows))


# numbers of a CPU, which any device takes as an operand
_ENDS = {end: torch.tensor(end, dtype=torch.bfloat16) for end in (torch.inf, -torch.inf)}


def bf16_above(x: Tensor) -> Tensor:
    """The smallest bf16 that is not below x. NaN stays NaN, what is too large becomes inf."""
    return _bf16_towards(x, torch.inf)


def bf16_below(x: Tensor) -> Tensor:
    """The largest bf16 that is not above x."""
    return _bf16_towards(x, -torch.inf)


def _bf16_towards(x: Tensor, end: float) -> Tensor:
    """x in bf16, rounded towards that end of the numbers.

    Traced, by the bits of fp32: a compiler may leave out a cast to bf16 and back, and what is made for the rounded
    number would be made for another one. Elsewhere in half as many calls.
    """
    if x.dtype != torch.float32 or not torch.compiler.is_compiling():
        near = x.to(torch.bfloat16)
        wrong = near < x if end > 0 else near > x
        # a tensor without data goes together with its like alone
        ends = _ENDS[end] if type(near) is Tensor and device_rules() is None else near.new_full((), end)
        return torch.where(wrong, torch.nextafter(near, ends), near)
    bits = x.view(torch.int32)
    # bf16 is the upper half of fp32: without the lower half a number comes nearer to zero
    upper = bits & -0x10000
    away = (upper != bits) & ((x > 0) if end > 0 else (x < 0))
    rounded = torch.where(away, upper + 0x10000, upper).view(torch.float32)
    return torch.where(x == x, rounded, x).to(torch.bfloat16)


def within_range(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Decoded `values`, in place, held inside fp16's finite range where their scale is finite.

    Half a step above fp16's largest number would be inf where x was finite; an inf or NaN of x is in the scale.
    """
    if dtype != torch.float16:
        return values
    limit = torch.where(scale.isfinite(), torch.finfo(dtype).max, torch.inf).to(values.dtype)
    return torch.minimum(torch.maximum(values, -limit, out=values), limit, out=values)
