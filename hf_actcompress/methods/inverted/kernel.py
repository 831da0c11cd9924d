"""One bit for the branch of each input of a GELU-like activation, and its gradient from its output: a pass each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from ...kernels.common import INTERPRETED, POINTWISE_LAUNCH, POINTWISE_TILE, cast, cdiv, divide, on, traced
from ...kernels.groups import join_bits, nvidia_generation
from ...kernels.launch import CachedLaunches
from ...reference.bits import packed_bytes
from .reference import INVERTED

# the inner polynomial's degree for 16-bit results: its error is small compared with the result's rounding
_DEGREES = {torch.bfloat16: 7, torch.float16: 8}


@CachedLaunches
@triton.jit
def _bits_kernel(x_ptr, bits_ptr, count, bytes, LIMIT: tl.constexpr, TILE: tl.constexpr):
    start = tl.program_id(0).to(tl.int64)
    at = start * TILE + tl.arange(0, TILE)[None, :]
    # elements beyond the end count as right of the minimum
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    packed = join_bits(tl.where((x >= LIMIT) & (x < float("inf")), 0, 1), 1, 1, TILE)
    place = start * (TILE // 8) + tl.arange(0, TILE // 8)[None, :]
    tl.store(bits_ptr + place, packed, mask=place < bytes)


@triton.jit
def _log(x):
    if INTERPRETED:
        return tl.log(x.to(tl.float64)).to(tl.float32)
    else:
        return libdevice.log(x)


@triton.jit
def _log2(x, NVIDIA: tl.constexpr):
    if INTERPRETED:
        return tl.log2(x.to(tl.float64)).to(tl.float32)
    elif NVIDIA:
        # this is one instruction
        return libdevice.fast_log2f(x)
    else:
        return tl.log2(x)


@triton.jit
def _slope(y, left, FIT: tl.constexpr, LEFT: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr):
    """f' from fp32 y on the branch given by `left`, by the reference's formula. FIT: as from `_constants`."""
    ratio = tl.minimum(tl.maximum(divide(y, FIT[0], False), 0.0), 1.0)
    # log(0) is -inf; the fit of the left branch ends at FIT[3]
    square = tl.where(left, -_log(ratio), y - FIT[0])
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
    # on a GPU the maximum of NaN and 0 is 0, so NaN is put back; an inf marked as left was NaN or inf itself
    return tl.where((y != y) | (left & (y == float("inf"))), float("nan"), slope)


@triton.jit
def _polynomial(x, COEFFICIENTS: tl.constexpr, DEGREE: tl.constexpr):
    value = tl.fma(x, COEFFICIENTS[DEGREE], COEFFICIENTS[DEGREE - 1])
    for i in tl.static_range(DEGREE - 1):
        value = tl.fma(value, x, COEFFICIENTS[DEGREE - 2 - i])
    return value


@triton.jit
def _fast_slope(y, left, FIT: tl.constexpr, LEFT: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr,
                DEGREE: tl.constexpr, NVIDIA: tl.constexpr):  # fmt: skip
    """The same for a 16-bit result, with approximate roots and logarithms. FIT and polynomials: as from `_fast`.

    The coordinate is negative on the left, so that only its sign has to be held. All three polynomials are computed,
    because selecting each coefficient would take more instructions.
    """
    ratio = tl.minimum(tl.maximum(y * FIT[0], 0.0), 1.0)
    # the share is 1 at the right end of the fit; for a larger y, f' is 1 up to rounding
    share = tl.minimum(tl.maximum(tl.fma(y, FIT[1], FIT[2]), 0.0), 1.0)
    root = tl.sqrt(tl.abs(tl.where(left, _log2(ratio, NVIDIA), share)))
    # log(0) is -inf, so the coordinate is limited
    root = tl.where(left, tl.maximum(-root, FIT[3]), root)
    outer = _polynomial(tl.fma(root, FIT[5], FIT[6]), OUTER, 7)
    slope = tl.where(root > FIT[4], outer, _polynomial(root, INNER, DEGREE))
    # NaN and inf are marked as left, and stay NaN
    slope = tl.where(root < 0.0, tl.fma(y, 0.0, y * _polynomial(root, LEFT, 8)), slope)
    return root * slope


@CachedLaunches
@triton.jit
def _bwd_kernel(
    dy_ptr, y_ptr, bits_ptr, dx_ptr, count,
    FIT: tl.constexpr, LEFT: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr, DEGREE: tl.constexpr,
    NVIDIA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * TILE
    # how many elements there are from `start` on, in 32 bits
    count = tl.minimum(count - start, TILE).to(tl.int32)
    byte, bit = tl.arange(0, TILE // 8), tl.arange(0, 8)[None, :]
    # one thread has all eight elements of a byte, so it extracts their bits itself
    packed = tl.load(bits_ptr + start // 8 + byte, mask=byte * 8 < count, other=0).to(tl.int32)
    left = ((packed[:, None] >> bit) & 1) != 0
    at = byte[:, None] * 8 + bit
    y = tl.load(y_ptr + start + at, mask=at < count, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + start + at, mask=at < count, other=0.0).to(tl.float32)
    if DEGREE > 0:
        slope = _fast_slope(y, left, FIT, LEFT, INNER, OUTER, DEGREE, NVIDIA)
    else:
        slope = _slope(y, left, FIT, LEFT, INNER, OUTER)
    tl.store(dx_ptr + start + at, cast(dy * slope, dx_ptr.dtype.element_ty), mask=at < count)


def _constants(kind: str) -> tuple[tuple[float, ...], ...]:
    """The minimum's value, the split, the end, the left fit's end; centres, halves and fits of the three pieces."""
    fit = INVERTED[kind]
    ends = (fit.y_min, fit.split, fit.end, fit.centres[0] + fit.halves[0])
    return (*ends, *fit.centres, *fit.halves), *fit.coefficients


@cache
def _fast(kind: str, degree: int) -> tuple[tuple[float, ...], ...]:
    """The numbers of both coordinates, and the three polynomials: of degree 8, of degree `degree`, and of degree 7.

    On the left the coordinate is -sqrt(-log2(y / y*)); on the right it is sqrt(y - y*) divided by its end.
    """
    fit, unit = INVERTED[kind], -math.sqrt(math.log(2.0))
    scales = [1 / half for half in fit.halves]
    shifts = [-centre * scale for centre, scale in zip(fit.centres, scales, strict=True)]
    left, inner, outer = fit.coefficients
    left = [unit * c for c in _composed(left, scales[0] * unit, shifts[0])]
    inner = [fit.end * c for c in _composed(_economised(inner, degree), scales[1] * fit.end, shifts[1])]
    outer = [fit.end * c for c in _economised(outer, 7)]
    reach, share = (fit.centres[0] + fit.halves[0]) / unit, fit.end**-2
    ends = (1 / fit.y_min, share, -share * fit.y_min, reach, fit.split / fit.end, scales[2] * fit.end, shifts[2])
    return ends, tuple(left), tuple(inner), tuple(outer)


def _composed(coefficients: Sequence[float], scale: float, shift: float) -> list[float]:
    """Coefficients of p(scale x + shift) from those of p, lowest power first."""
    found: list[float] = []
    for coefficient in reversed(coefficients):
        # multiply by (scale x + shift), and add the coefficient
        found = [shift * low + scale * high for low, high in zip((*found, 0.0), (0.0, *found), strict=True)]
        found[0] += coefficient
    return found


def _economised(coefficients: Sequence[float], degree: int) -> list[float]:
    """The best approximation of lower degree on [-1, 1]: multiples of Chebyshev polynomials are subtracted."""
    found = list(coefficients)
    while len(found) > degree + 1:
        last, lower = [0.0, 1.0], [1.0]
        for _ in range(len(found) - 2):
            longer = [2 * a - b for a, b in zip((0.0, *last), (*lower, 0.0, 0.0), strict=True)]
            last, lower = longer, last
        share = found[-1] / last[-1]
        found = [a - share * b for a, b in zip(found, last, strict=True)][:-1]
    return found


def _fake_bits(x: Tensor, kind: str) -> Tensor:
    return x.new_empty(packed_bytes(x.numel(), 1), dtype=torch.uint8)


@traced(_fake_bits)
def activation_output_bits(x: Tensor, kind: str) -> Tensor:
    """Which elements of x are left of the minimum of f, or inf, or NaN: uint8, 8 elements per byte."""
    bits = _fake_bits(x, kind)
    if x.numel():
        x = x.contiguous()
        # rounded to x's dtype, because torch compares in that dtype
        limit = torch.tensor(INVERTED[kind].x_min, dtype=x.dtype).item()
        with on(x):
            _bits_kernel[(cdiv(x.numel(), POINTWISE_TILE),)](
                x, bits, x.numel(), bits.numel(), LIMIT=limit, **POINTWISE_LAUNCH
            )
    return bits


def _fake_bwd(dy: Tensor, y: Tensor, bits: Tensor, kind: str) -> Tensor:
    return y.new_empty(y.shape)


@traced(_fake_bwd)
def activation_output_bwd(dy: Tensor, y: Tensor, bits: Tensor, kind: str) -> Tensor:
    """dx = dy * f'(x) in y's dtype, rounded once, from y = f(x) and the bits that were made from x."""
    dx = _fake_bwd(dy, y, bits, kind)
    if y.numel():
        degree = _DEGREES.get(dx.dtype, 0)
        fit, left, inner, outer = _fast(kind, degree) if degree else _constants(kind)
        with on(y):
            _bwd_kernel[(cdiv(y.numel(), POINTWISE_TILE),)](
                dy.contiguous(), y.contiguous(), bits.contiguous(), dx, y.numel(),
                FIT=fit, LEFT=left, INNER=inner, OUTER=outer, DEGREE=degree,
                NVIDIA=nvidia_generation() > 0, **POINTWISE_LAUNCH,
            )  # fmt: skip
    return dx


def _sample_bits(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> Iterator[tuple[Any, ...]]:
    for kind, fit in INVERTED.items():
        x = 2 * torch.randn(rows, width, device=device)
        # the limit itself and its neighbours
        x.view(-1)[::5] = fit.x_min
        x.view(-1)[1::5] = fit.x_min * (1 + 2**-7)
        x.view(-1)[2::35] = torch.inf
        yield x.to(dtype), kind


def _sample_bwd(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> Iterator[tuple[Any, ...]]:
    for kind, fit in INVERTED.items():
        count = rows * width
        left = torch.arange(count, device=device).view(rows, width) % 3 == 0
        # any output: from the minimum to 12 on the right, to 0 on the left
        y = torch.rand(rows, width, device=device) * torch.where(left, -fit.y_min, 12.0) + fit.y_min
        bits = torch.nn.functional.pad(left.view(-1), (0, -count % 8)).view(-1, 8).long()
        bits = (bits << torch.arange(8, device=device)).sum(1).to(torch.uint8)
        yield torch.randn(rows, width, device=device).to(dtype), y.to(dtype), bits, kind


SAMPLES = {"activation_output_bits": _sample_bits, "activation_output_bwd": _sample_bwd}
