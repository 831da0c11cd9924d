"""Puts the largest entries of each row back in their places; the product for dW is torch's, on dense rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.common import POINTWISE_LAUNCH, POINTWISE_TILE, cdiv, on, traced
from ...kernels.groups import split_bits
from ...kernels.launch import CachedLaunches
from ...reference.not_finite import nothing
from .reference import chunked_grad_weight, topk_pack


@triton.jit
def _row_and_tile(tiles):
    """This program's row and tile. The grid has one axis, because its other axes end at 65535."""
    at = tl.program_id(0).to(tl.int64)
    return at // tiles, at % tiles


@triton.jit
def _bits(mask_ptr, row, tile, row_bytes, TILE: tl.constexpr):
    """The mask's bits [1, TILE], 0 or 1. A row ends with a byte, whose unused bits are 0."""
    place = tile * (TILE // 8) + tl.arange(0, TILE // 8)[None, :]
    packed = tl.load(mask_ptr + row * row_bytes + place, mask=place < row_bytes, other=0)
    return split_bits(packed, 1, 1, TILE)


@CachedLaunches
@triton.jit
def _count_kernel(mask_ptr, count_ptr, row_bytes, tiles, TILE: tl.constexpr):
    """Counts the entries in each tile of a row."""
    row, tile = _row_and_tile(tiles)
    bits = _bits(mask_ptr, row, tile, row_bytes, TILE)
    tl.store(count_ptr + row * tiles + tile, tl.sum(tl.sum(bits, axis=1), axis=0))


@CachedLaunches
@triton.jit
def _spread_kernel(
    values_ptr, mask_ptr, before_ptr, out_ptr, kept, features, row_bytes, tiles, TILE: tl.constexpr
):  # fmt: skip
    """Writes the entries, which are in order of position; `before` counts a row's entries up to each tile's end."""
    row, tile = _row_and_tile(tiles)
    bits = _bits(mask_ptr, row, tile, row_bytes, TILE)
    before = tl.load(before_ptr + row * tiles + tile - 1, mask=tile > 0, other=0).to(tl.int64)
    nth = before + tl.cumsum(bits, axis=1) - bits
    value = tl.load(values_ptr + row * kept + nth, mask=(bits != 0) & (nth < kept), other=0.0)
    # if x was not finite, all values are NaN; then the elements that were not kept become NaN, too
    first = tl.load(values_ptr + row * kept, mask=kept > 0, other=0.0).to(tl.float32)
    value = tl.where(bits != 0, value, (first - first).to(value.dtype))
    col = tile * TILE + tl.arange(0, TILE)[None, :]
    tl.store(out_ptr + row * features + col, value, mask=col < features)


@CachedLaunches
@triton.jit
def _scatter_kernel(values_ptr, index_ptr, out_ptr, kept, features, tiles, TILE: tl.constexpr):
    row, tile = _row_and_tile(tiles)
    at = tile * TILE + tl.arange(0, TILE)
    index = tl.load(index_ptr + row * kept + at, mask=at < kept, other=0).to(tl.int32)
    if index_ptr.dtype.element_ty == tl.int16:
        # the number is unsigned, as in the reference
        index &= 0xFFFF
    value = tl.load(values_ptr + row * kept + at, mask=at < kept)
    tl.store(out_ptr + row * features + index, value, mask=at < kept)


@traced(lambda values, where, features, masked: values.new_empty(values.size(0), features))
def topk_unpack(values: Tensor, where: Tensor, features: int, masked: bool) -> Tensor:
    """The rows [R, D], zero where nothing was kept; all NaN if x had a NaN or inf."""
    (rows, kept), values, where = values.shape, values.contiguous(), where.contiguous()
    if rows * features == 0 or not masked:
        out, tiles = nothing(values, rows, features), cdiv(kept, POINTWISE_TILE)
        if values.numel():
            with on(values):
                _scatter_kernel[(rows * tiles,)](values, where, out, kept, features, tiles, **POINTWISE_LAUNCH)
        return out
    out, tiles = values.new_empty(rows, features), cdiv(features, POINTWISE_TILE)
    count = where.new_empty(rows, tiles, dtype=torch.int32)
    grid = (rows * tiles,)
    with on(values):
        _count_kernel[grid](where, count, where.size(1), tiles, **POINTWISE_LAUNCH)
        before = count.cumsum(1)
        _spread_kernel[grid](values, where, before, out, kept, features, where.size(1), tiles, **POINTWISE_LAUNCH)
    return out


def topk_grad_weight(dy: Tensor, values: Tensor, where: Tensor, features: int, masked: bool) -> Tensor:
    """dW [O, D] = dy^T x of dy [R, O] and the kept entries of x."""
    return chunked_grad_weight(topk_unpack, dy, values, where, features, masked)


def _sample_unpack(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> Iterator[tuple[Any, ...]]:
    x = torch.randn(rows, width, device=device).to(dtype)
    for masked in (True, False):
        yield *topk_pack(x, -(-width // 8), masked), width, masked


def _sample_grad_weight(*sizes: Any) -> Iterator[tuple[Any, ...]]:
    for values, *packed in _sample_unpack(*sizes):
        yield torch.randn(values.size(0), 48, device=values.device).to(values.dtype), values, *packed


SAMPLES = {"topk_grad_weight": _sample_grad_weight, "topk_unpack": _sample_unpack}
