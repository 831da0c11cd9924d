"""What the kernels of grouped formats share: tiles of whole groups, rows in any layout, scales rounded outwards."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import INTERPRETED, next_power_of_2

# a group that is wider than this is processed in pieces
_WIDEST_TILE = 16384
_PIECE = 4096

SMALLEST_SCALE = tl.constexpr(torch.finfo(torch.bfloat16).tiny)


class GroupTile(NamedTuple):
    """A tile of `groups` groups with `columns` features each, and the warps that share it."""

    groups: int
    columns: int
    warps: int
    whole: bool


def group_tile(group_size: int, features: int, most: int = 128) -> GroupTile:
    """A tile with 4 to 32 elements per thread, and at least 8 columns, for which one draw gives the random numbers.

    Args:
        group_size: Features of a group.
        features: Features of a row.
        most: The most groups of a tile if groups are small or odd.
    """
    columns = max(next_power_of_2(group_size), 8)
    if columns > _WIDEST_TILE:
        return GroupTile(1, _PIECE, 4, False)
    # small, odd and shorter last groups take registers for their addresses
    even = group_size % 16 == 0 and features % group_size == 0
    elements = max(columns, _PIECE if even else min(1024, most * columns))
    return GroupTile(elements // columns, columns, min(max(elements // 1024, 4), 16), True)


def index_dtype(groups: int) -> tl.dtype:
    """The dtype for indices: divisions are in 32 bits if the number of groups allows it."""
    return tl.int32 if groups < 2**31 - 2**16 else tl.int64


def nvidia_generation() -> int:
    """10 * major + minor of the NVIDIA GPU that a launch would go to; 0 on other GPUs and in the interpreter."""
    if INTERPRETED.value:
        return 0
    target = triton.runtime.driver.active.get_current_target()
    return int(target.arch) if target.backend == "cuda" else 0


class RowLayout(NamedTuple):
    """The rows of a tensor [..., D] in its own layout: two inner sizes and three strides, the last one between rows."""

    x: Tensor
    sizes: tuple[int, int]
    strides: tuple[int, int, int]
    dense: bool


def rows_of(x: Tensor) -> RowLayout:
    """The rows of x without a copy for up to four axes with unit stride in the last, such as q, k and v by head."""
    if x.is_contiguous() or x.dim() > 4 or x.stride(-1) != 1:
        return RowLayout(x.contiguous(), (1, 1), (x.size(-1), 0, 0), True)
    sizes = (1, 1, 1, *x.shape[:-1])[-3:]
    strides = (0, 0, 0, *x.stride()[:-1])[-3:]
    return RowLayout(x, sizes[1:], strides, False)


@triton.jit
def row_offset(row, size1, size2, stride0, stride1, stride2):
    """The offset of a row in memory; `row` counts the rows in order."""
    outer = row // size2
    at = (row - outer * size2).to(tl.int64) * stride2
    return at + (outer // size1).to(tl.int64) * stride0 + (outer % size1).to(tl.int64) * stride1


@triton.jit
def group_bounds(at, per_row, features, group, size1, size2, stride0, stride1, stride2, DENSE: tl.constexpr):
    """For each group: where it begins, its row, its index in that row, and how many features it has.

    DENSE: all groups are whole and follow one another, so the division that finds the row is not needed.
    """
    if DENSE:
        return at.to(tl.int64) * group, at, at * 0, at * 0 + group
    else:
        row = at // per_row
        nth = at - row * per_row
        start = row_offset(row, size1, size2, stride0, stride1, stride2) + nth * group
        return start, row, nth, tl.minimum(group, features - nth * group)


@triton.jit
def _bf16_towards(x, larger):
    """fp32 x as a bf16 number: cut, and one step further from zero if `larger` is set and digits were cut off."""
    bits = x.to(tl.uint32, bitcast=True)
    cut = bits & 0xFFFF0000
    cut = tl.where(larger & (cut != bits), cut + 0x10000, cut)
    # cutting can turn a NaN into inf, so NaN is put back
    return tl.where(x == x, cut.to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def bf16_above(x):
    """The smallest bf16 number that is at least x, as fp32. NaN stays NaN; a number that is too large becomes inf."""
    return _bf16_towards(x, x > 0)


@triton.jit
def bf16_below(x):
    """The largest bf16 number that is at most x, as fp32."""
    return _bf16_towards(x, x < 0)


@triton.jit
def nearest_integer(x):
    """x rounded to the nearest integer, ties to even, for 0 <= x < 2^22: the sum has no bits left for a fraction."""
    return (x + 8388608.0) - 8388608.0


@triton.jit
def within_range(value, scale, dtype: tl.constexpr):
    """Values limited to fp16's finite range where the scale is finite, as in the reference."""
    if dtype == tl.float16:
        finite = (scale == scale) & (tl.abs(scale) != float("inf"))
        value = tl.where(finite & (value > 65504.0), 65504.0, value)
        value = tl.where(finite & (value < -65504.0), -65504.0, value)
    return value


@triton.jit
def as_code(x):
    """fp32 x as int32; NaN becomes 0."""
    return tl.where(x == x, x, 0.0).to(tl.int32)


# the next two functions join or split neighbouring elements, which one thread holds, so that accesses stay wide


@triton.jit
def join_bits(codes, BITS: tl.constexpr, G: tl.constexpr, C: tl.constexpr):
    """Codes int32 [G, C] packed into bytes [G, C BITS / 8], with the first element in the lowest bits."""
    if BITS == 1:
        low, high = tl.split(tl.reshape(codes, [G, C // 2, 2]))
        codes = low | (high << 1)
    if BITS <= 2:
        low, high = tl.split(tl.reshape(codes, [G, C * BITS // 4, 2]))
        codes = low | (high << 2)
    if BITS <= 4:
        low, high = tl.split(tl.reshape(codes, [G, C * BITS // 8, 2]))
        codes = low | (high << 4)
    return codes.to(tl.uint8)


@triton.jit
def split_bits(packed, BITS: tl.constexpr, G: tl.constexpr, C: tl.constexpr):
    """Bytes [G, C BITS / 8] unpacked into codes int32 [G, C]."""
    codes = packed.to(tl.int32)
    if BITS <= 4:
        codes = tl.reshape(tl.join(codes & 15, codes >> 4), [G, C * BITS // 4])
    if BITS <= 2:
        codes = tl.reshape(tl.join(codes & 3, codes >> 2), [G, C * BITS // 2])
    if BITS == 1:
        codes = tl.reshape(tl.join(codes & 1, codes >> 1), [G, C])
    return codes
