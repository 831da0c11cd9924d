"""The branch of each input of a GELU-like activation in one bit, and its gradient from its output, each in one pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from ..reference.bits import packed_bytes
from ..reference.inverted import INVERTED
from .common import INTERPRETED, POINTWISE_TILE, POINTWISE_WARPS, STRICT, cast, divide, on, traced
from .groups import join_bits, nvidia_generation, split_bits


@triton.jit
def _bits_kernel(x_ptr, bits_ptr, count, bytes, LIMIT: tl.constexpr, TILE: tl.constexpr):
    start = tl.program_id(0).to(tl.int64)
    at = start * TILE + tl.arange(0, TILE)[None, :]
    # what is not there is on the right
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    packed = join_bits(((x < LIMIT) | (x == float("inf"))).to(tl.int32), 1, 1, TILE)
    place = start * (TILE // 8) + tl.arange(0, TILE // 8)[None, :]
    tl.store(bits_ptr + place, packed, mask=place < bytes)


@triton.jit
def _log(x, FAST: tl.constexpr):
    if INTERPRETED:
        return tl.log(x.to(tl.float64)).to(tl.float32)
    elif FAST:
        # an instruction of NVIDIA's
        return libdevice.fast_logf(x)
    else:
        return libdevice.log(x)


@triton.jit
def _slope(y, left, FIT: tl.constexpr, LEFT: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr):
    """f' of fp32 y on the branch that `left` says: the reference's formula. FIT as `_constants` gives it."""
    ratio = tl.minimum(tl.maximum(divide(y, FIT[0], False), 0.0), 1.0)
    # log(0) is -inf; FIT[3] is where the fit of the left branch ends
    square = tl.where(left, -_log(ratio, False), y - FIT[0])
    root = tl.math.sqrt_rn(tl.maximum(square, 0.0))
    root = tl.where(left, tl.minimum(root, FIT[3]), root)
    outer = root > FIT[1]
    centre = tl.where(left, FIT[4], tl.where(outer, FIT[6], FIT[5]))
    half = tl.where(left, FIT[7], tl.where(outer, FIT[9], FIT[8]))
    z = divide(root - centre, half, False)
    polynomial = z * 0.0
    for i in tl.static_range(9):
        right = tl.where(outer, OUTER[8 - i], INNER[8 - i])
        polynomial = polynomial * z + tl.where(left, LEFT[8 - i], right)
    slope = tl.where(left, y * root, root) * polynomial
    slope = tl.where((root >= FIT[2]) & (left == 0), 1.0, slope)
    # on a GPU the maximum of NaN and 0 is 0; an inf on the left is what inf itself is marked as
    return tl.where((y != y) | (left & (y == float("inf"))), float("nan"), slope)


@triton.jit
def _polynomial(x, SCALE: tl.constexpr, SHIFT: tl.constexpr, COEFFICIENTS: tl.constexpr):
    z = tl.fma(x, SCALE, SHIFT)
    value = tl.fma(z, COEFFICIENTS[8], COEFFICIENTS[7])
    for i in tl.static_range(7):
        value = tl.fma(value, z, COEFFICIENTS[6 - i])
    return value


@triton.jit
def _fast_slope(y, left, FIT: tl.constexpr, LEFT: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr,
                NVIDIA: tl.constexpr):  # fmt: skip
    """The same for a result of 16 bits, in half of the instructions: no division, three polynomials of which one is
    taken (to choose each coefficient costs more), approximate roots and logarithms."""
    ratio = tl.minimum(tl.maximum(y * FIT[10], 0.0), 1.0)
    square = tl.where(left, -_log(ratio, NVIDIA), y - FIT[0])
    root = tl.sqrt(tl.maximum(square, 0.0))
    root = tl.where(left, tl.minimum(root, FIT[3]), root)
    right = tl.where(root > FIT[1], _polynomial(root, FIT[13], FIT[16], OUTER),
                     _polynomial(root, FIT[12], FIT[15], INNER))  # fmt: skip
    slope = root * tl.where(left, y * _polynomial(root, FIT[11], FIT[14], LEFT), right)
    slope = tl.where((root >= FIT[2]) & (left == 0), 1.0, slope)
    # on a GPU the maximum of NaN and 0 is 0; an inf on the left is what inf itself is marked as
    return tl.where((y != y) | (left & (y == float("inf"))), float("nan"), slope)


@triton.jit
def _bwd_kernel(
    dy_ptr, y_ptr, bits_ptr, dx_ptr, count, bytes,
    FIT: tl.constexpr, LEFT: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr, FAST: tl.constexpr,
    NVIDIA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64)
    place = start * (TILE // 8) + tl.arange(0, TILE // 8)[None, :]
    packed = tl.load(bits_ptr + place, mask=place < bytes, other=0)
    left = split_bits(packed, 1, 1, TILE) != 0
    at = start * TILE + tl.arange(0, TILE)[None, :]
    y = tl.load(y_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    slope = _fast_slope(y, left, FIT, LEFT, INNER, OUTER, NVIDIA) if FAST else _slope(y, left, FIT, LEFT, INNER, OUTER)
    tl.store(dx_ptr + at, cast(dy * slope, dx_ptr.dtype.element_ty), mask=at < count)


def _constants(kind: str) -> tuple[float, ...]:
    """The minimum's value, the split, the end, the left fit's end; centres and halves of the three pieces.

    Then what stands in place of divisions by these: one over the minimum's value and over the halves, and the shifts.
    """
    fit = INVERTED[kind]
    shifts = (-centre / half for centre, half in zip(fit.centres, fit.halves, strict=True))
    ends = (fit.y_min, fit.split, fit.end, fit.centres[0] + fit.halves[0])
    return (*ends, *fit.centres, *fit.halves, 1 / fit.y_min, *(1 / half for half in fit.halves), *shifts)


def _fake_bits(x: Tensor, kind: str) -> Tensor:
    return x.new_empty(packed_bytes(x.numel(), 1), dtype=torch.uint8)


@traced(_fake_bits)
def _activation_output_bits(x: Tensor, kind: str) -> Tensor:
    bits = _fake_bits(x, kind)
    if x.numel():
        x = x.contiguous()
        # rounded to x's dtype, as torch compares
        limit = torch.tensor(INVERTED[kind].x_min, dtype=x.dtype).item()
        with on(x):
            _bits_kernel[(triton.cdiv(x.numel(), POINTWISE_TILE),)](
                x, bits, x.numel(), bits.numel(), LIMIT=limit, TILE=POINTWISE_TILE, num_warps=POINTWISE_WARPS, **STRICT
            )
    return bits


def activation_output_bits(x: Tensor, kind: str) -> Tensor:
    """Which elements of x lie left of the minimum of f, or are inf: uint8, 8 elements per byte."""
    bits: Tensor = _activation_output_bits(x, kind)
    return bits


def _fake_bwd(dy: Tensor, y: Tensor, bits: Tensor, kind: str) -> Tensor:
    return y.new_empty(y.shape)


@traced(_fake_bwd)
def _activation_output_bwd(dy: Tensor, y: Tensor, bits: Tensor, kind: str) -> Tensor:
    dx = _fake_bwd(dy, y, bits, kind)
    if y.numel():
        left, inner, outer = INVERTED[kind].coefficients
        with on(y):
            _bwd_kernel[(triton.cdiv(y.numel(), POINTWISE_TILE),)](
                dy.contiguous(), y.contiguous(), bits.contiguous(), dx, y.numel(), bits.numel(),
                FIT=_constants(kind), LEFT=left, INNER=inner, OUTER=outer, FAST=dx.dtype.itemsize < 4,
                NVIDIA=nvidia_generation() > 0, TILE=POINTWISE_TILE, num_warps=POINTWISE_WARPS, **STRICT,
            )  # fmt: skip
    return dx


def activation_output_bwd(dy: Tensor, y: Tensor, bits: Tensor, kind: str) -> Tensor:
    """dx = dy * f'(x) in y's dtype, rounded once, from y = f(x) and the bits of x."""
    dx: Tensor = _activation_output_bwd(dy, y, bits, kind)
    return dx


def _sample_bits(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> Iterator[tuple[Any, ...]]:
    for kind, fit in INVERTED.items():
        x = 2 * torch.randn(rows, width, device=device)
        # the limit itself and its neighbours
        x.view(-1)[::5] = fit.x_min
        x.view(-1)[1::5] = fit.x_min * (1 + 2**-7)
        yield x.to(dtype), kind


def _sample_bwd(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> Iterator[tuple[Any, ...]]:
    for kind, fit in INVERTED.items():
        count = rows * width
        left = torch.arange(count, device=device).view(rows, width) % 3 == 0
        # any output from the minimum to 12 on the right, to 0 on the left
        y = torch.rand(rows, width, device=device) * torch.where(left, -fit.y_min, 12.0) + fit.y_min
        bits = torch.nn.functional.pad(left.view(-1), (0, -count % 8)).view(-1, 8).long()
        bits = (bits << torch.arange(8, device=device)).sum(1).to(torch.uint8)
        yield torch.randn(rows, width, device=device).to(dtype), y.to(dtype), bits, kind


SAMPLES = {"activation_output_bits": _sample_bits, "activation_output_bwd": _sample_bwd}
