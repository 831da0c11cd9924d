"""Group quantisation: packing and unpacking in one pass each.

Rounding to nearest gives the reference's codes, scales and zero points bit by bit on any GPU. Both use the same formula
in the same order (codes are products with the scale's correctly rounded reciprocal). The only sum of a product, code
times scale plus zero point, has an exact product, so it does not matter whether a compiler fuses it. Stochastic
rounding draws from Philox with a seed of the codecs' generator. Each element has its own random number, which does not
depend on the tile. The number has 16 bits, which biases a code by at most 2^-17.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.bits import pack_rows, row_bytes, unpack_rows
from ..reference.groups import group_count, rows_features
from ..reference.rng import kernel_seed
from .common import STRICT, cast, cdiv, on, traced
from .groups import (
    SMALLEST_SCALE,
    as_code,
    bf16_above,
    bf16_below,
    group_bounds,
    group_tile,
    index_dtype,
    join_bits,
    nearest_integer,
    rows_of,
    split_bits,
    within_range,
)
from .launch import CachedLaunches


@triton.jit
def _noise(seed, counter, G: tl.constexpr, C: tl.constexpr):
    """Random numbers in [0, 1) [G, C] from counters [G, C / 8]; their 16 bits leave integers below 256 unchanged."""
    a, b, c, d = tl.randint4x(seed, counter)
    left = tl.join(tl.join(a & 0xFFFF, b & 0xFFFF), tl.join(c & 0xFFFF, d & 0xFFFF))
    right = tl.join(tl.join(a >> 16, b >> 16), tl.join(c >> 16, d >> 16))
    return tl.reshape(tl.join(left, right), [G, C]).to(tl.float32) * 0.0000152587890625


@triton.jit
def _range(x, counts):
    """Smallest and largest of each row of a tile: NaN if the row has a NaN, (inf, -inf) if nothing counts."""
    low = tl.min(tl.where(counts, x, float("inf")), axis=1)
    high = tl.max(tl.where(counts, x, float("-inf")), axis=1)
    broken = tl.max(tl.where(counts & (x != x), 1, 0), axis=1) > 0
    return tl.where(broken, float("nan"), low), tl.where(broken, float("nan"), high), broken


@triton.jit
def _codes(x, zero, scale, seed_ptr, counter, LEVELS: tl.constexpr, STOCHASTIC: tl.constexpr, SIGN: tl.constexpr,
           G: tl.constexpr, C: tl.constexpr):  # fmt: skip
    value = (x - zero[:, None]) * tl.math.div_rn(1.0, scale)[:, None]
    if STOCHASTIC:
        value = tl.floor(value + _noise(tl.load(seed_ptr), counter, G, C))
        value = tl.minimum(tl.maximum(value, 0.0), LEVELS)
    else:
        value = nearest_integer(tl.minimum(tl.maximum(value, 0.0), LEVELS))
    if SIGN:
        decoded = value * scale[:, None] + zero[:, None]
        value += tl.where(x > 0, 1.0, 0.0) - tl.where(decoded > 0, 1.0, 0.0)
        value = tl.minimum(tl.maximum(value, 0.0), LEVELS)
    return as_code(value)


@triton.jit
def _group_bytes(at, row, nth, row_size, group_bytes, DENSE: tl.constexpr):
    """Where the codes of each group begin, and how many bytes they have."""
    if DENSE:
        return at.to(tl.int64) * group_bytes, at * 0 + group_bytes
    else:
        first = nth * group_bytes
        return row.to(tl.int64) * row_size + first, tl.minimum(group_bytes, row_size - first)


@CachedLaunches
@triton.jit
def _pack_kernel(
    x_ptr, channels_ptr, seed_ptr, codes_ptr, scale_ptr, zero_ptr,
    total, per_row, features, group, row_size, group_bytes, size1, size2, stride0, stride1, stride2,
    BITS: tl.constexpr, LEVELS: tl.constexpr, STOCHASTIC: tl.constexpr, SKIPPED: tl.constexpr, DENSE: tl.constexpr,
    WHOLE: tl.constexpr, SIGN: tl.constexpr, INDEX: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Packs G of `total` groups. DENSE: rows of whole groups follow one another. WHOLE: a tile holds whole groups.

    SKIPPED: the number of channels that are left out of the ranges.
    """
    per_byte: tl.constexpr = 8 // BITS
    at = tl.program_id(0).to(INDEX) * G + tl.arange(0, G)
    known = at < total
    start, row, nth, length = group_bounds(at, per_row, features, group, size1, size2, stride0, stride1, stride2, DENSE)
    byte, bytes = _group_bytes(at, row, nth, row_size, group_bytes, DENSE)
    cols = tl.arange(0, C)
    eighths, quarters = tl.arange(0, C // 8), tl.arange(0, C // per_byte)
    counter = at.to(tl.int64)[:, None] * ((group + 7) // 8) + eighths[None, :]
    # the first feature of each group
    feature = (at % per_row) * group if SKIPPED else at

    x = tl.zeros([G, C], tl.float32)
    low, high = tl.full([G], float("inf"), tl.float32), tl.full([G], float("-inf"), tl.float32)
    broken = at < 0
    for piece in range(0, 1 if WHOLE else tl.cdiv(group, C)):
        col = piece * C + cols
        inside = known[:, None] & (col[None, :] < length[:, None])
        x = tl.load(x_ptr + start[:, None] + col[None, :], mask=inside, other=0.0).to(tl.float32)
        counts = inside
        for i in tl.static_range(SKIPPED):
            counts &= feature[:, None] + col[None, :] != tl.load(channels_ptr + i)
        least, largest, nan = _range(x, counts)
        low, high, broken = tl.minimum(low, least), tl.maximum(high, largest), broken | nan
    low, high = tl.where(broken, float("nan"), low), tl.where(broken, float("nan"), high)

    zero = bf16_below(low)
    scale = bf16_above(tl.math.div_rn(high - zero, LEVELS) + SMALLEST_SCALE)
    tl.store(scale_ptr + at, cast(scale, tl.bfloat16), mask=known)
    tl.store(zero_ptr + at, cast(zero, tl.bfloat16), mask=known)
    for piece in range(0, 1 if WHOLE else tl.cdiv(group, C)):
        col = piece * C + cols
        inside = known[:, None] & (col[None, :] < length[:, None])
        if not WHOLE:
            x = tl.load(x_ptr + start[:, None] + col[None, :], mask=inside, other=0.0).to(tl.float32)
        codes = _codes(x, zero, scale, seed_ptr, counter + piece * (C // 8), LEVELS, STOCHASTIC, SIGN, G, C)
        packed = join_bits(tl.where(inside, codes, 0), BITS, G, C)
        place = piece * (C // per_byte) + quarters
        written = known[:, None] & (place[None, :] < bytes[:, None])
        tl.store(codes_ptr + byte[:, None] + place[None, :], packed, mask=written)


@CachedLaunches
@triton.jit
def _unpack_kernel(
    codes_ptr, scale_ptr, zero_ptr, out_ptr, total, per_row, features, group, row_size, group_bytes,
    BITS: tl.constexpr, DENSE: tl.constexpr, INDEX: tl.constexpr, WORK: tl.constexpr,
    G: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    per_byte: tl.constexpr = 8 // BITS
    at = tl.program_id(0).to(INDEX) * G + tl.arange(0, G)
    known = at < total
    start, row, nth, length = group_bounds(at, per_row, features, group, 1, 1, features, 0, 0, DENSE)
    byte, bytes = _group_bytes(at, row, nth, row_size, group_bytes, DENSE)
    scale = tl.load(scale_ptr + at, mask=known, other=1.0).to(WORK)[:, None]
    zero = tl.load(zero_ptr + at, mask=known, other=0.0).to(WORK)[:, None]
    place = tl.program_id(1) * (C // per_byte) + tl.arange(0, C // per_byte)
    read = known[:, None] & (place[None, :] < bytes[:, None])
    packed = tl.load(codes_ptr + byte[:, None] + place[None, :], mask=read, other=0)
    value = within_range(split_bits(packed, BITS, G, C).to(WORK) * scale + zero, scale, out_ptr.dtype.element_ty)
    col = tl.program_id(1) * C + tl.arange(0, C)
    inside = known[:, None] & (col[None, :] < length[:, None])
    tl.store(out_ptr + start[:, None] + col[None, :], cast(value, out_ptr.dtype.element_ty), mask=inside)


def _kernel_bits(features: int, bits: int, group_size: int) -> int:
    """Bits of a code in the kernel: a byte if codes have 3 or 5 bits, or if a group does not end with a byte."""
    return bits if bits not in (3, 5) and (group_size * bits % 8 == 0 or group_size >= features) else 8


def _is_dense(features: int, group: int, width: int, codes: Tensor) -> bool:
    """Whether groups follow one another without a gap, and no row ends with unused bits."""
    return features % group == 0 and group * width % 8 == 0 and codes.size(1) * 8 == features * width


def _fake_pack(x: Tensor, bits: int, group_size: int, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows, features = rows_features(x)
    scale = x.new_empty(rows, group_count(features, group_size), dtype=torch.bfloat16)
    return x.new_empty(rows, row_bytes(features, bits), dtype=torch.uint8), scale, torch.empty_like(scale)


@traced(_fake_pack)
def _int_group_pack(
    x: Tensor, bits: int, group_size: int, seed: Tensor | None, channels: Tensor | None, keep_sign: bool
) -> tuple[Tensor, Tensor, Tensor]:
    codes, scale, zero = _fake_pack(x, bits, group_size)
    if x.numel() == 0:
        return codes, scale, zero
    features = rows_features(x)[1]
    group = min(group_size, features)
    width = _kernel_bits(features, bits, group)
    target = codes if width == bits else codes.new_zeros(codes.size(0), codes.size(1) * 8 // bits)
    # a thread holds ranges and scales of several groups; with 128 groups it spills on compute capability 8.0
    rows, tile = rows_of(x if x.dim() else x.view(1)), group_tile(group, features, most=64)
    with on(x):
        _pack_kernel[(cdiv(scale.numel(), tile.groups),)](
            rows.x, x if channels is None else channels, x if seed is None else seed, target, scale, zero,
            scale.numel(), scale.size(1), features, group, target.size(1), cdiv(group * width, 8),
            *rows.sizes, *rows.strides,
            BITS=width, LEVELS=2.0**bits - 1, STOCHASTIC=seed is not None,
            SKIPPED=0 if channels is None else channels.numel(),
            DENSE=rows.dense and _is_dense(features, group, width, target), WHOLE=tile.whole,
            SIGN=keep_sign, INDEX=index_dtype(scale.numel()),
            G=tile.groups, C=tile.columns, num_warps=tile.warps, **STRICT,
        )  # fmt: skip
    if width != bits:
        codes = pack_rows(target, bits)
    return codes, scale, zero


def int_group_pack(
    x: Tensor, bits: int, group_size: int, stochastic: bool, channels: Tensor | None = None, keep_sign: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """codes uint8 [R, ceil(D bits / 8)], scale and zero bf16 [R, n], from x [..., D]; `channels` are int64 [k]."""
    seed = kernel_seed(x.device) if stochastic else None
    return _int_group_pack(x, bits, group_size, seed, channels, keep_sign)


def _fake_unpack(packed: Tensor, scale: Tensor, zero: Tensor, features: int, dtype: torch.dtype, *_: int) -> Tensor:
    return packed.new_empty(packed.size(0), features, dtype=dtype)


@traced(_fake_unpack)
def int_group_unpack(
    packed: Tensor, scale: Tensor, zero: Tensor, features: int, dtype: torch.dtype, bits: int, group_size: int
) -> Tensor:
    """The rows [R, D] in `dtype`, decoded from what `int_group_pack` returned."""
    out = _fake_unpack(packed, scale, zero, features, dtype)
    if out.numel() == 0:
        return out
    group = min(group_size, features)
    width = _kernel_bits(features, bits, group)
    packed, scale, zero = packed.contiguous(), scale.contiguous(), zero.contiguous()
    if width != bits:
        packed = unpack_rows(packed, bits)
    tile = group_tile(group, features)
    with on(out):
        _unpack_kernel[(cdiv(scale.numel(), tile.groups), cdiv(group, tile.columns))](
            packed, scale, zero, out,
            scale.numel(), scale.size(1), features, group, packed.size(1), cdiv(group * width, 8),
            BITS=width, DENSE=_is_dense(features, group, width, packed), INDEX=index_dtype(scale.numel()),
            WORK=tl.float64 if dtype == torch.float64 else tl.float32,
            G=tile.groups, C=tile.columns, num_warps=tile.warps, **STRICT,
        )  # fmt: skip
    return out


def _sample_pack(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> Iterator[tuple[Any, ...]]:
    x = (torch.randn(rows, width, device=device) * 3 + 1).to(dtype)
    # if a group has no other channels, nothing counts for its range
    channels = torch.randperm(width, device=device)[: min(3, width - 1)] if width > 1 else None
    for bits in (8, 5, 4, 3, 2):
        for group_size, skipped in ((64, None), (5, None), (max(width, 1), channels)):
            yield x, bits, group_size, False, skipped
            yield x, bits, group_size, False, skipped, True
        # integers that equal their codes, so that no random number changes them
        grid = torch.randint(2**bits, (rows, width), device=device)
        grid[:, ::64], grid[:, 1::64] = 0, 2**bits - 1
        yield grid.to(dtype), bits, 64, True, None


def _sample_unpack(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> Iterator[tuple[Any, ...]]:
    for bits in (8, 5, 4, 3, 2):
        for group_size in (64, 5, max(width, 1)):
            codes = torch.randint(256, (rows, row_bytes(width, bits)), device=device, dtype=torch.uint8)
            scale = torch.rand(rows, group_count(width, group_size), device=device).to(torch.bfloat16)
            yield codes, scale, -scale, width, dtype, bits, group_size


SAMPLES = {"int_group_pack": _sample_pack, "int_group_unpack": _sample_unpack}
