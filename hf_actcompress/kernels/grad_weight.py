"""The weight gradient dW = dy^T x from x's codes. The product decodes them as it reads them, so x is never in memory.

This file also has what all such products share, including those of kept tiles, sampled rows and pooled tokens: tile
sizes, the share of the tokens that a program sums, and the order of the sums. A program computes one tile of dW from
its share of the tokens, in order, in fp32. If there are fewer tiles than multiprocessors, several programs share the
tokens of a tile, and their sums are added in order, so that dW is the same in each run. Codes decode to the reference's
bits; only the order of the sum differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.bits import row_bytes
from ..reference.groups import group_count
from .common import INTERPRETED, STRICT, as_rows, cast, cdiv, next_power_of_2, on, traced
from .float8 import decode
from .groups import split_bits, within_range
from .launch import CachedLaunches


class Tile(NamedTuple):
    """Sizes of a tile of dW, tokens of one step, warps that share the tile, and steps whose loads are in flight."""

    outputs: int
    features: int
    tokens: int
    warps: int
    stages: int


# bytes of an element -> tile. In fp32 without tf32 every product is one instruction with operands in registers
TILES = {2: Tile(128, 128, 64, 8, 3), 4: Tile(64, 64, 16, 8, 2)}
# the fewest tokens that a product of tiles takes
_FEWEST_TOKENS = 16
# rows of tiles whose programs run at the same time, so that they read the same data from the cache
_BAND = tl.constexpr(8)
# the fewest tokens for one program; without a GPU it is so few that small tensors take every path
_SHARE = {"cuda": 512, "cpu": 16}
_PROCESSORS_ELSEWHERE = 64


class Launch(NamedTuple):
    """What a launch needs: sums [S, O, D] of the S shares (in dy's dtype if S is 1), the grid, and the tile's sizes."""

    sums: Tensor
    grid: tuple[int, int]
    tile: Tile


def tile_for(dy: Tensor, width: int, short: bool = False) -> Tile:
    """A tile for pieces of `width` features that no tile crosses.

    `short` saves registers: it halves a step's tokens, or the features where a product of tiles takes no fewer tokens.
    """
    tile = TILES[dy.element_size()]
    if short and tile.tokens > _FEWEST_TOKENS:
        tile = tile._replace(tokens=tile.tokens // 2)
    elif short:
        tile = tile._replace(features=tile.features // 2)
    features = min(tile.features, max(next_power_of_2(width), 16))
    warps = max(tile.warps * features // tile.features, 4)
    return tile._replace(features=features, warps=warps)


def launch_of(dy: Tensor, features: int, tokens: int, tile: Tile, width: int | None = None) -> Launch:
    """Plan a product of dy [R, O] and `tokens` rows of `features`; no tile crosses a piece of `width` features."""
    width = width or features
    across = cdiv(features, width) * cdiv(width, tile.features)
    tiles = cdiv(dy.size(1), tile.outputs) * across
    processors = _PROCESSORS_ELSEWHERE
    if dy.is_cuda:
        processors = torch.cuda.get_device_properties(dy.device).multi_processor_count
    shares = max(min(processors // tiles, tokens // _SHARE[dy.device.type]), 1)
    dtype = dy.dtype if shares == 1 else torch.float32
    return Launch(dy.new_empty(shares, dy.size(1), features, dtype=dtype), (tiles, shares), tile)


def added(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """dW [O, D], the sum of the shares' sums in order."""
    return sums[0] if sums.size(0) == 1 else sums.sum(0).to(dtype)


def precision() -> str:
    """The precision of fp32 products: tf32 if torch's own products may use it."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def options(dy: Tensor, tile: Tile) -> dict[str, Any]:
    """The options of every launch."""
    return {
        "PRECISION": precision() if dy.dtype == torch.float32 else "ieee", "M": tile.outputs, "N": tile.features,
        "K": tile.tokens, "num_warps": tile.warps, "num_stages": tile.stages, **STRICT,
    }  # fmt: skip


@triton.jit
def place(outputs, across, M: tl.constexpr):
    """This program's row of tiles (of outputs) and column of tiles (of features)."""
    at = tl.program_id(0)
    return tl.swizzle2d(at // across, at % across, tl.cdiv(outputs, M), across, _BAND)


@triton.jit
def share(tokens, K: tl.constexpr):
    """First and last token that this program sums. All its steps are whole except the last one."""
    each = tl.cdiv(tl.cdiv(tokens, tl.num_programs(1)), K) * K
    first = tl.program_id(1) * each
    return first, tl.minimum(first + each, tokens)


@triton.jit
def load_dy(dy_ptr, row, known, out, outputs, stride):
    """Rows of dy as columns [M, K]; in this layout copies to shared memory run ahead of the products on every GPU."""
    mask = (out < outputs)[:, None] & known[None, :]
    return tl.load(dy_ptr + row[None, :] * stride + out[:, None], mask=mask, other=0.0)


@triton.jit
def add_product(sums, a, b, PRECISION: tl.constexpr):
    """sums [M, N] + a @ b, with a [M, K] and b [K, N]."""
    if INTERPRETED:
        # the interpreter's numpy has no arithmetic for bf16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision=PRECISION)


@triton.jit
def store_tile(out_ptr, sums, out, col, inside, outputs, features):
    """Store this program's sums at rows `out` and at those columns `col` that are `inside`."""
    start = (tl.program_id(1).to(tl.int64) * outputs + out) * features
    mask = (out < outputs)[:, None] & inside[None, :]
    tl.store(out_ptr + start[:, None] + col[None, :], cast(sums, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _scaled(codes, scale_ptr, zero_ptr, row, known, first, per_row, group,
            GROUPS: tl.constexpr, ZERO: tl.constexpr, DTYPE: tl.constexpr,
            K: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """The values of fp32 codes [K, N] of features from `first` on. GROUPS: how many share the tile evenly, or 0."""
    at = first // group + tl.arange(0, GROUPS) if GROUPS > 0 else (first + tl.arange(0, N)) // group
    there = known[:, None] & (at < per_row)[None, :]
    where = row[:, None] * per_row + at[None, :]
    scale = tl.load(scale_ptr + where, mask=there, other=0.0).to(tl.float32)
    if GROUPS > 0:
        codes = tl.reshape(codes, [K, GROUPS, N // GROUPS])
        scale = scale[:, :, None]
    value = codes * scale
    if ZERO:
        zero = tl.load(zero_ptr + where, mask=there, other=0.0).to(tl.float32)
        value += zero[:, :, None] if GROUPS > 0 else zero
    return cast(tl.reshape(within_range(value, scale, DTYPE), [K, N]), DTYPE)


@CachedLaunches
@triton.jit
def _decoded_kernel(
    dy_ptr, codes_ptr, scale_ptr, zero_ptr, out_ptr, tokens, outputs, features, stride, row_size, per_row, group,
    BITS: tl.constexpr, E4M3: tl.constexpr, GROUPS: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    per_byte: tl.constexpr = 8 // BITS
    down, right = place(outputs, tl.cdiv(features, N), M)
    out = down * M + tl.arange(0, M)
    byte = right * (N // per_byte) + tl.arange(0, N // per_byte)
    first, last = share(tokens, K)
    sums = tl.zeros([M, N], tl.float32)
    for start in range(first, last, K):
        token = start + tl.arange(0, K)
        known = token < last
        row = token.to(tl.int64)
        dy = load_dy(dy_ptr, row, known, out, outputs, stride)
        read = known[:, None] & (byte < row_size)[None, :]
        packed = tl.load(codes_ptr + row[:, None] * row_size + byte[None, :], mask=read, other=0)
        codes = decode(packed, E4M3) if E4M3 is not None else split_bits(packed, BITS, K, N).to(tl.float32)
        x = _scaled(
            codes, scale_ptr, zero_ptr, row, known, right * N, per_row, group,
            GROUPS, E4M3 is None, dy_ptr.dtype.element_ty, K, N,
        )  # fmt: skip
        sums = add_product(sums, dy, x, PRECISION)
    col = right * N + tl.arange(0, N)
    store_tile(out_ptr, sums, out, col, col < features, outputs, features)


def _decoded(
    dy: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, features: int, bits: int, e4m3: bool | None, group_size: int
) -> Tensor:
    if dy.numel() == 0 or features == 0:
        return dy.new_zeros(dy.size(1), features)
    dy, codes, scale, zero = as_rows(dy), codes.contiguous(), scale.contiguous(), zero.contiguous()
    tile, group = tile_for(dy, features), min(group_size, features)
    if scale.size(1) == 1 or group % tile.features == 0:
        groups = 1
    else:
        groups = tile.features // group if tile.features % group == 0 else 0
    # if groups do not share a tile evenly, each feature loads its own scale
    sums, grid, tile = launch_of(dy, features, dy.size(0), tile if groups else tile_for(dy, features, short=True))
    with on(dy):
        _decoded_kernel[grid](
            dy, codes, scale, zero, sums, dy.size(0), dy.size(1), features, dy.stride(0), codes.size(1),
            scale.size(1), group, BITS=bits, E4M3=e4m3, GROUPS=groups, **options(dy, tile),
        )  # fmt: skip
    return added(sums, dy.dtype)


@traced(lambda dy, packed, scale, zero, features, bits, group_size: dy.new_empty(dy.size(1), features))
def _int_group_grad_weight(
    dy: Tensor, packed: Tensor, scale: Tensor, zero: Tensor, features: int, bits: int, group_size: int
) -> Tensor:
    return _decoded(dy, packed, scale, zero, features, bits, None, group_size)


def int_group_grad_weight(
    dy: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero: Tensor,
    features: int,
    bits: int,
    group_size: int,
    values: Tensor | None = None,
    channels: Tensor | None = None,
) -> Tensor:
    """dW [O, D] from dy [R, O] and what `int_group_pack` returned; `values` [R, k] replace the features `channels`."""
    dweight = _int_group_grad_weight(dy, packed, scale, zero, features, bits, group_size)
    if values is not None and channels is not None:
        # the exact columns get a product of their own; contiguous copies fix the order of its sum
        dweight.index_copy_(1, channels.long(), dy.contiguous().t().mm(values.contiguous()))
    return dweight


@traced(lambda dy, codes, scale, group_size: dy.new_empty(dy.size(1), codes.size(1)))
def float8_grad_weight(dy: Tensor, codes: Tensor, scale: Tensor, group_size: int) -> Tensor:
    """dW [O, D] from dy [R, O] and what `float8_pack` returned."""
    e4m3 = codes.dtype == torch.float8_e4m3fn
    codes = codes.contiguous().view(torch.uint8)
    return _decoded(dy, codes, scale, scale, codes.size(1), 8, e4m3, group_size)


def sample_dy(device: torch.device, dtype: torch.dtype, rows: int) -> Iterator[Tensor]:
    """dy [R, O] with few outputs, whose tiles share the tokens among programs, and with many; odd sizes if R is odd."""
    while True:
        for outputs in (48, 144):
            yield torch.randn(rows, outputs + rows % 2, device=device).to(dtype)


def _sample_int_group(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> Iterator[tuple[Any, ...]]:
    # groups smaller than a tile, equal to several, and crossing a tile's edge; one group per row
    sizes = ((8, 64), (4, 64), (2, 64), (4, 5), (8, 256), (2, max(width, 1)))
    for (bits, group_size), dy in zip(sizes, sample_dy(device, dtype, rows), strict=False):
        codes = torch.randint(256, (rows, row_bytes(width, bits)), device=device, dtype=torch.uint8)
        scale = torch.rand(rows, group_count(width, group_size), device=device).to(torch.bfloat16)
        packed = dy, codes, scale, -scale, width, bits, group_size
        yield packed
        if group_size == 5:
            channels = torch.randperm(width, device=device)[:3].to(torch.int32)
            yield *packed, torch.randn(rows, channels.numel(), device=device).to(dtype), channels


def _sample_float8(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> Iterator[tuple[Any, ...]]:
    sizes = ((torch.float8_e4m3fn, 128), (torch.float8_e5m2, 128), (torch.float8_e4m3fn, 5), (torch.float8_e5m2, width))
    for (format, group_size), dy in zip(sizes, sample_dy(device, dtype, rows), strict=False):
        codes = torch.randn(rows, width, device=device).to(format)
        scale = torch.rand(rows, group_count(width, max(group_size, 1)), device=device).to(torch.bfloat16)
        yield dy, codes, scale, max(group_size, 1)


SAMPLES = {"float8_grad_weight": _sample_float8, "int_group_grad_weight": _sample_int_group}
