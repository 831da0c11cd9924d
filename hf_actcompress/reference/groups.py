"""Groups of neighbouring features that share a scale, and the rows of a tensor a few at a time."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compiling import is_compiling
from .device_rules import device_rules, takes_constants

# elements that are converted to the work dtype at the same time: they fit a CPU's cache, or a small part of a GPU's
# memory
_CHUNK = {"cpu": 1 << 18}
CHUNK_ELSEWHERE = 1 << 24


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def widened(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in the work dtype of `dtype`; these calls take half the host time of `to`."""
    return x.double() if dtype == torch.float64 else x.float()


def keep_signs_(codes: Tensor, values: Tensor, scale: Tensor, zero: Tensor, levels: int) -> Tensor:
    """Move whole codes by one, in place, where what is decoded is above zero and the value is not, or the reverse.

    A group's largest code may decode to zero. A value above zero then has no such code: one that is so small that the
    group's range is the same without it in the range's precision.
    """
    decoded = codes * scale + zero
    return codes.add_((values > 0).to(codes.dtype) - (decoded > 0).to(codes.dtype)).clamp_(0, levels)


def rows_features(x: Tensor) -> tuple[int, int]:
    """(R, D) of x [..., D]; a scalar is one row of one feature."""
    # not `Size.numel`, which becomes a fixed number when a compiler traces for any size
    if not x.dim():
        return 1, 1
    *leading, features = x.shape
    return math.prod(leading), features


def group_count(features: int, group_size: int) -> int:
    return -(-features // group_size)


def spans(features: int, group_size: int) -> list[tuple[int, int, int]]:
    """(start, stop, group size) for the features in whole groups, and then for the shorter last group."""
    whole = features // group_size * group_size
    out = [(0, whole, group_size)] if whole else []
    return [*out, (whole, features, features - whole)] if whole < features else out


def in_groups(rows: Tensor, size: int) -> Tensor:
    """A view [r, n, size] of rows [r, n size]."""
    return rows.view(rows.size(0), rows.size(1) // size, size)


def chunk_rows(features: int, device: torch.device) -> int:
    """How many rows of so many features to process at a time."""
    if is_compiling():
        # all in one chunk in a graph: the compiler fuses the ops anyway, and it would unroll a loop
        return torch.iinfo(torch.int64).max
    return max(1, _chunk(device) // max(features, 1))


def _chunk(device: torch.device) -> int:
    return _CHUNK["cpu"] if is_cpu(device) else CHUNK_ELSEWHERE


def is_cpu(device: torch.device) -> bool:
    """Whether a CPU computes on that device; the device may be an estimated one."""
    rules = device_rules()
    return device.type == "cpu" and (rules is None or rules.on_cpu)


def chunk_starts(count: int, step: int) -> Sequence[int]:
    """The starts of chunks of `step` among `count` items. An estimate leaves most of them out."""
    starts, rules = range(0, count, step), device_rules()
    return starts if rules is None else rules.turns(starts)


def is_one_chunk(rows: int, features: int, device: torch.device) -> bool:
    """Whether `row_chunks` would yield a tensor [..., features] of so many rows as one chunk."""
    if is_compiling():
        return True
    count = rows * features
    if not count:
        return False
    # a CPU's chunks are the smallest: a tensor that fits one is one chunk on any device
    return rows == 1 or count <= _CHUNK["cpu"] or count <= _chunk(device)


def row_chunks(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The rows of x [..., D] in order, a few at a time, as (slice, [r, D]). x is never copied as a whole."""
    if x.numel() == 0:
        return
    x = x.unsqueeze(0) if x.dim() == 0 else x
    if is_compiling():
        # a traced loop over rows would only be right for this number of rows
        yield slice(None), x.reshape(-1, x.size(-1))
        return
    features, start = x.size(-1), 0
    # q, k and v are transposed views that cannot be flattened, so one sequence is copied at a time
    for part in (x,) if x.is_contiguous() or x.dim() <= 2 else (x[i] for i in chunk_starts(x.size(0), 1)):
        rows = part.reshape(-1, features)
        step = min(chunk_rows(features, x.device), rows.size(0))
        for first in chunk_starts(rows.size(0), step):
            chunk = rows[first : first + step]
            yield slice(start, start + chunk.size(0)), chunk
            start += chunk.size(0)


def row_slices(rows: int, features: int, device: torch.device) -> Iterator[slice]:
    """The slices that `row_chunks` would yield, for a tensor that does not exist yet."""
    if is_compiling():
        yield slice(None)
        return
    step = min(chunk_rows(features, device), max(rows, 1))
    for start in chunk_starts(rows, step):
        yield slice(start, min(start + step, rows))


class Operands(NamedTuple):
    """Operands for the computation of a group's scale and zero point, for one work dtype.

    A divisor must be a tensor: a GPU divides by a Python number by multiplying with its reciprocal, and the last bit
    may differ. For the other operands a CPU is twice as fast with tensors; on other devices they would have to be
    filled.

    Attributes:
        steps: Number of steps that the scale divides the range into.
        tiny: The smallest normal bf16 number, which is the smallest scale.
        inf: inf in bf16.
        half: 2^16; the bits of an fp32 number above it are a bf16 number.
        last: 1, the last bit of an integer.
    """

    steps: Tensor
    tiny: Tensor
    inf: Tensor
    half: Any
    last: Any


def _operands(steps: float, of: Callable[..., Tensor], dtype: torch.dtype, half: Any, last: Any) -> Operands:
    tiny = torch.finfo(torch.bfloat16).tiny
    return Operands(of(steps, dtype), of(tiny, dtype), of(torch.inf, torch.bfloat16), half, last)


# the numbers of steps of all formats
_STEPS = (3.0, 7.0, 15.0, 31.0, 255.0, 448.0, 57344.0)
_ON_CPU = {
    (steps, dtype): _operands(
        steps,
        lambda value, dtype: torch.tensor([value], dtype=dtype, device="cpu"),
        dtype,
        *(torch.tensor([value], dtype=torch.int32, device="cpu") for value in (0x10000, 1)),
    )
    for steps in _STEPS
    for dtype in (torch.float32, torch.float64)
}


def operands(steps: float, like: Tensor) -> Operands:
    """The operands for tensors of like's dtype (fp32 or fp64) and device."""
    if takes_constants(like):
        known = _ON_CPU.get((steps, like.dtype))
        if known is not None:
            return known
    return _operands(steps, lambda value, dtype: like.new_full((1,), value, dtype=dtype), like.dtype, 0x10000, 1)


def group_scale(extent: Tensor, numbers: Operands) -> Tensor:
    """bf16 [...]: extent [..., 1] (fp32 or fp64, not negative) divided by the number of steps, rounded up, above 0."""
    return bf16_above(torch.addcdiv(numbers.tiny, extent, numbers.steps), numbers)


def bf16_above(x: Tensor, numbers: Operands) -> Tensor:
    """The smallest bf16 number [...] that is at least x [..., 1] > 0. NaN stays NaN; a number too large becomes inf."""
    if x.dtype != torch.float32:
        near = x.to(torch.bfloat16)
        return torch.where(near < x, torch.nextafter(near, numbers.inf), near).squeeze(-1)
    bits = x.view(torch.int32)
    if is_compiling():
        # bf16 is the upper half of fp32. A compiler may drop a cast to bf16 and back; here that changes nothing
        above = ((bits + 0xFFFF) & -0x10000).view(torch.float32)
        return torch.where(x == x, above, x).to(torch.bfloat16).squeeze(-1)
    # the bf16 number before the result is the upper half of the fp32 number before x
    upper = (bits - numbers.last).view(torch.bfloat16).select(-1, 1 if sys.byteorder == "little" else 0)
    return torch.nextafter(upper, numbers.inf)


def bf16_below(x: Tensor, numbers: Operands) -> Tensor:
    """The largest bf16 number that is at most x, in x's dtype. Too small a number becomes -inf, and NaN any number."""
    if x.dtype == torch.float32:
        # the remainder has the integer's sign: positive numbers get smaller, and negative ones get a larger magnitude
        bits = x.view(torch.int32)
        return (bits - torch.fmod(bits, numbers.half)).view(torch.float32)
    near = x.to(torch.bfloat16)
    return torch.where(near > x, torch.nextafter(near, -numbers.inf), near).to(x.dtype)


def within_range(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Limit decoded `values`, in place, to fp16's finite range where their scale is finite.

    Otherwise a finite x could decode to inf, by half a step above fp16's largest number. An inf or NaN of x is in the
    scale.
    """
    if dtype != torch.float16:
        return values
    limit = torch.where(scale.isfinite(), torch.finfo(dtype).max, torch.inf).to(values.dtype)
    return torch.minimum(torch.maximum(values, -limit, out=values), limit, out=values)
