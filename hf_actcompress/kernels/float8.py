"""8-bit floats with a scale per group, packed and unpacked in one pass each, with the reference's bits on any GPU.

From compute capability 8.9 on there are instructions for the conversions. Before, e4m3 has none, and integer arithmetic
is used. Both give the same bytes for all numbers that a division by the group's scale can give. No sum here has a
product as an operand, so a compiler cannot fuse them into one rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.groups import group_count, rows_features
from .common import STRICT, cast, cdiv, on, traced
from .groups import (
    SMALLEST_SCALE,
    bf16_above,
    group_bounds,
    group_tile,
    index_dtype,
    nvidia_generation,
    rows_of,
    within_range,
)
from .launch import CachedLaunches


@triton.jit
def encode(x, E4M3: tl.constexpr, HARDWARE: tl.constexpr):
    """fp32 x as the bits of the nearest float8 in uint8, ties to even; a number that is too large becomes NaN or inf.

    HARDWARE: use the instruction, which returns the largest number for one that is too large. That does not occur after
    the division by the group's scale.
    """
    if HARDWARE:
        return x.to(tl.float8e4nv if E4M3 else tl.float8e5).to(tl.uint8, bitcast=True)
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    # the last bit of the added number is worth the smallest float8, so the sum rounds to a multiple of it. The number
    # that is subtracted from the bits is the difference of the exponents' biases
    if E4M3:
        small = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        normal = (size + 0x7FFFF + ((size >> 20) & 1) - 0x3C000000) >> 20
        code = tl.where(size < 0x3C800000, small, normal)
        code = tl.where(size >= 0x43F00000, 0x7F, code)
    else:
        small = (tl.abs(x) + 128.0).to(tl.uint32, bitcast=True) - 0x43000000
        normal = (size + 0xFFFFF + ((size >> 21) & 1) - 0x38000000) >> 21
        code = tl.where(size < 0x38800000, small, normal)
        code = tl.where(size >= 0x47800000, tl.where(size > 0x7F800000, 0x7F, 0x7C), code)
    return (code | sign).to(tl.uint8)


@triton.jit
def decode(code, E4M3: tl.constexpr, HARDWARE: tl.constexpr = False):
    """Bits in uint8 as fp32, exactly, by way of fp16: e5m2 is fp16's upper byte; e4m3's fields are shifted."""
    if HARDWARE:
        return code.to(tl.float8e4nv if E4M3 else tl.float8e5, bitcast=True).to(tl.float32)
    code = code.to(tl.int32)
    if E4M3:
        half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        value = half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    else:
        return (code << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@CachedLaunches
@triton.jit
def _pack_kernel(
    x_ptr, codes_ptr, scale_ptr, total, per_row, features, group, size1, size2, stride0, stride1, stride2,
    LARGEST: tl.constexpr, E4M3: tl.constexpr, HARDWARE: tl.constexpr, DENSE: tl.constexpr,
    WHOLE: tl.constexpr, INDEX: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(INDEX) * G + tl.arange(0, G)
    known = at < total
    start, row, nth, length = group_bounds(at, per_row, features, group, size1, size2, stride0, stride1, stride2, DENSE)
    target = start if DENSE else row.to(tl.int64) * features + nth * group
    cols = tl.arange(0, C)
    x = tl.zeros([G, C], tl.float32)
    largest = tl.zeros([G], tl.float32)
    broken = at < 0
    for piece in range(0, 1 if WHOLE else tl.cdiv(group, C)):
        col = piece * C + cols
        inside = known[:, None] & (col[None, :] < length[:, None])
        x = tl.load(x_ptr + start[:, None] + col[None, :], mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(x), axis=1))
        broken = broken | (tl.max(tl.where(x != x, 1, 0), axis=1) > 0)
    scale = bf16_above(tl.math.div_rn(tl.where(broken, float("nan"), largest), LARGEST) + SMALLEST_SCALE)
    tl.store(scale_ptr + at, cast(scale, tl.bfloat16), mask=known)
    inverse = tl.math.div_rn(1.0, scale)
    for piece in range(0, 1 if WHOLE else tl.cdiv(group, C)):
        col = piece * C + cols
        inside = known[:, None] & (col[None, :] < length[:, None])
        if not WHOLE:
            x = tl.load(x_ptr + start[:, None] + col[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(codes_ptr + target[:, None] + col[None, :], encode(x * inverse[:, None], E4M3, HARDWARE), mask=inside)


@CachedLaunches
@triton.jit
def _unpack_kernel(
    codes_ptr, scale_ptr, out_ptr, total, per_row, features, group,
    E4M3: tl.constexpr, HARDWARE: tl.constexpr, DENSE: tl.constexpr, INDEX: tl.constexpr, WORK: tl.constexpr,
    G: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(INDEX) * G + tl.arange(0, G)
    known = at < total
    start, row, nth, length = group_bounds(at, per_row, features, group, 1, 1, features, 0, 0, DENSE)
    scale = tl.load(scale_ptr + at, mask=known, other=1.0).to(WORK)[:, None]
    col = tl.program_id(1) * C + tl.arange(0, C)
    inside = known[:, None] & (col[None, :] < length[:, None])
    code = tl.load(codes_ptr + start[:, None] + col[None, :], mask=inside, other=0)
    value = within_range(decode(code, E4M3, HARDWARE).to(WORK) * scale, scale, out_ptr.dtype.element_ty)
    tl.store(out_ptr + start[:, None] + col[None, :], cast(value, out_ptr.dtype.element_ty), mask=inside)


def _fake_pack(x: Tensor, dtype: torch.dtype, group_size: int) -> tuple[Tensor, Tensor]:
    rows, features = rows_features(x)
    scale = x.new_empty(rows, group_count(features, group_size), dtype=torch.bfloat16)
    return x.new_empty(rows, features, dtype=dtype), scale


@traced(_fake_pack)
def float8_pack(x: Tensor, dtype: torch.dtype, group_size: int) -> tuple[Tensor, Tensor]:
    """Codes [R, D] of the float8 `dtype` and scales bf16 [R, n], from x [..., D]."""
    codes, scale = _fake_pack(x, dtype, group_size)
    if x.numel() == 0:
        return codes, scale
    features = codes.size(1)
    group = min(group_size, features)
    rows, tile = rows_of(x if x.dim() else x.view(1)), group_tile(group, features)
    with on(x):
        _pack_kernel[(cdiv(scale.numel(), tile.groups),)](
            rows.x, codes.view(torch.uint8), scale, scale.numel(), scale.size(1), features, group,
            *rows.sizes, *rows.strides,
            LARGEST=torch.finfo(dtype).max, E4M3=dtype == torch.float8_e4m3fn, HARDWARE=nvidia_generation() >= 89,
            DENSE=rows.dense and features % group == 0, WHOLE=tile.whole, INDEX=index_dtype(scale.numel()),
            G=tile.groups, C=tile.columns, num_warps=tile.warps, **STRICT,
        )  # fmt: skip
    return codes, scale


def _fake_unpack(codes: Tensor, scale: Tensor, dtype: torch.dtype, group_size: int) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


@traced(_fake_unpack)
def float8_unpack(codes: Tensor, scale: Tensor, dtype: torch.dtype, group_size: int) -> Tensor:
    """The rows [R, D] in `dtype`, decoded from what `float8_pack` returned."""
    out = _fake_unpack(codes.contiguous(), scale, dtype, group_size)
    if out.numel() == 0:
        return out
    features = out.size(1)
    group = min(group_size, features)
    tile = group_tile(group, features)
    with on(out):
        _unpack_kernel[(cdiv(scale.numel(), tile.groups), cdiv(group, tile.columns))](
            codes.contiguous().view(torch.uint8), scale.contiguous(), out,
            scale.numel(), scale.size(1), features, group,
            E4M3=codes.dtype == torch.float8_e4m3fn, HARDWARE=nvidia_generation() >= 89, DENSE=features % group == 0,
            INDEX=index_dtype(scale.numel()), WORK=tl.float64 if dtype == torch.float64 else tl.float32,
            G=tile.groups, C=tile.columns, num_warps=tile.warps, **STRICT,
        )  # fmt: skip
    return out


_FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)


def _sample_pack(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> Iterator[tuple[Any, ...]]:
    # including numbers below the smallest normal one
    x = torch.randn(rows, width, device=device) * torch.logspace(-7, 1, max(width, 1), device=device)[:width]
    for format in _FORMATS:
        for group_size in (128, 5, max(width, 1)):
            yield x.to(dtype), format, group_size


def _sample_unpack(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> Iterator[tuple[Any, ...]]:
    for format in _FORMATS:
        for group_size in (128, 5, max(width, 1)):
            # all finite numbers of the format
            codes = (torch.arange(rows * width, device=device) * 37 % 247).sub(123).abs().to(torch.uint8)
            scale = torch.rand(rows, group_count(width, group_size), device=device).to(torch.bfloat16)
            yield codes.view(rows, width).view(format), scale, dtype, group_size


SAMPLES = {"float8_pack": _sample_pack, "float8_unpack": _sample_unpack}
