"""LayerNorm's backward, and the kernel that all norms' backwards share. torch's forward is one kernel already."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import layer_norm as reference
from .common import (
    STRICT,
    WIDE_TILE,
    WIDEST_ROW,
    WIDEST_SUMS,
    cast,
    cdiv,
    divide,
    on,
    programs,
    row_tile,
    traced,
    widened,
)
from .launch import CachedLaunches

_Shape = tuple[int, ...]


@triton.jit
def _affine(
    weight_ptr, bias_ptr, cols, inside,
    FROM_OUTPUT: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ONE_PLUS: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Gain and bias [1, C] in fp32; 1 and 0 if the norm has none."""
    gain = tl.full([C], 1.0, tl.float32)
    if HAS_WEIGHT:
        gain = tl.load(weight_ptr + cols, mask=inside, other=1.0).to(tl.float32)
        if ONE_PLUS:
            gain = 1.0 + gain
    bias = tl.zeros([C], tl.float32)
    if FROM_OUTPUT and HAS_BIAS:
        bias = tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    return gain[None, :], bias[None, :]


@triton.jit
def _normed(
    kept, gain, bias, mean, rstd, bound,
    FROM_OUTPUT: tl.constexpr, CENTRED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """x^ from the input, (x - mean) * rstd, or from the output, (y - bias) / gain, limited to |x^| <= `bound`."""
    normed = kept.to(tl.float32)
    if FROM_OUTPUT:
        if HAS_BIAS:
            normed = normed - bias
        if HAS_WEIGHT:
            normed = divide(normed, tl.where(gain == 0.0, 1.0, gain), False)
            held = tl.minimum(tl.maximum(normed, -bound), bound)
            # on a GPU the maximum of NaN and a number is the number, so NaN is put back
            normed = tl.where(normed == normed, held, normed)
    else:
        if CENTRED:
            normed -= mean
        normed *= rstd
    return normed


@triton.jit
def _store_dx(dx_ptr, residual_ptr, at, mask, dx, RESIDUAL: tl.constexpr):
    """Store dx, or the sum of x's other gradient and dx; each is rounded as if dx were stored first."""
    dx = cast(dx, dx_ptr.dtype.element_ty)
    if RESIDUAL:
        residual = tl.load(residual_ptr + at, mask=mask, other=0.0)
        dx = cast(widened(residual) + widened(dx), dx_ptr.dtype.element_ty)
    tl.store(dx_ptr + at, dx, mask=mask)


@CachedLaunches
@triton.jit
def _norm_bwd_kernel(
    dy_ptr, kept_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, residual_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    rows, width, bound,
    FROM_OUTPUT: tl.constexpr, CENTRED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ONE_PLUS: tl.constexpr, RESIDUAL: tl.constexpr, DX: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Writes dx [rows, width], and dweight and dbias [programs, width], which are sums over each program's rows."""
    cols = tl.arange(0, C)
    inside = cols < width
    gain, bias = _affine(weight_ptr, bias_ptr, cols, inside, FROM_OUTPUT, HAS_WEIGHT, HAS_BIAS, ONE_PLUS, C)
    dweight = tl.zeros([R, C], tl.float32)
    dbias = tl.zeros([R, C], tl.float32)
    first = tl.program_id(0) * R
    # Triton 3.6's interpreter takes no tensors in range()
    while first < rows:
        row = (first + tl.arange(0, R)).to(tl.int64)
        mask = (row < rows)[:, None] & inside[None, :]
        at = row[:, None] * width + cols[None, :]
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        kept = tl.load(kept_ptr + at, mask=mask, other=0.0)
        # outside of a row dy is 0, so the value of x^ does not matter there
        normed = _normed(kept, gain, bias, mean, rstd, bound, FROM_OUTPUT, CENTRED, HAS_WEIGHT, HAS_BIAS)
        if DWEIGHT:
            dweight += dy * normed
        if DBIAS:
            dbias += dy
        if DX:
            dnormed = dy * gain
            # both sums come first, because the second one needs values that are freed after the first result
            through_mean = (tl.sum(dnormed * normed, axis=1) / width)[:, None] * rstd
            direct_mean = (tl.sum(dnormed, axis=1) / width)[:, None] * rstd
            dx = dnormed * rstd - normed * through_mean
            if CENTRED:
                dx -= direct_mean
            _store_dx(dx_ptr, residual_ptr, at, mask, dx, RESIDUAL)
        first += tl.num_programs(0) * R
    at = tl.program_id(0).to(tl.int64) * width + cols
    if DWEIGHT:
        tl.store(dweight_ptr + at, tl.sum(dweight, axis=0), mask=inside)
    if DBIAS:
        tl.store(dbias_ptr + at, tl.sum(dbias, axis=0), mask=inside)


@triton.jit
def _add(sum_ptr, cols, width, written, term):
    """Add to this program's own row of sums in memory; its first `written` columns have been written before."""
    at = tl.program_id(0).to(tl.int64) * width + cols
    before = tl.load(sum_ptr + at, mask=cols < written, other=0.0)
    tl.store(sum_ptr + at, before + tl.sum(term, axis=0), mask=cols < width)


@CachedLaunches
@triton.jit
def _wide_norm_bwd_kernel(
    dy_ptr, kept_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, residual_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    rows, width, bound,
    FROM_OUTPUT: tl.constexpr, CENTRED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ONE_PLUS: tl.constexpr, RESIDUAL: tl.constexpr, DX: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Like `_norm_bwd_kernel`, for rows that are too wide for registers: two passes in blocks of C columns.

    The first pass computes the sums over a row; the second, for which the rows are in a cache, computes all results.
    """
    first = tl.program_id(0) * R
    while first < rows:
        row = (first + tl.arange(0, R)).to(tl.int64)
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        direct = tl.zeros([R, C], tl.float32)
        through = tl.zeros([R, C], tl.float32)
        start = 0 if DX else width
        while start < width:
            cols = start + tl.arange(0, C)
            inside = cols < width
            mask = (row < rows)[:, None] & inside[None, :]
            at = row[:, None] * width + cols[None, :]
            gain, bias = _affine(weight_ptr, bias_ptr, cols, inside, FROM_OUTPUT, HAS_WEIGHT, HAS_BIAS, ONE_PLUS, C)
            dnormed = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32) * gain
            kept = tl.load(kept_ptr + at, mask=mask, other=0.0)
            normed = _normed(kept, gain, bias, mean, rstd, bound, FROM_OUTPUT, CENTRED, HAS_WEIGHT, HAS_BIAS)
            through += dnormed * normed
            if CENTRED:
                direct += dnormed
            start += C
        # times rstd, which is a factor of both terms
        through_mean = (tl.sum(through, axis=1) / width)[:, None] * rstd
        direct_mean = (tl.sum(direct, axis=1) / width)[:, None] * rstd
        written = tl.where(first < tl.num_programs(0) * R, 0, width)
        start = 0
        while start < width:
            cols = start + tl.arange(0, C)
            inside = cols < width
            mask = (row < rows)[:, None] & inside[None, :]
            at = row[:, None] * width + cols[None, :]
            gain, bias = _affine(weight_ptr, bias_ptr, cols, inside, FROM_OUTPUT, HAS_WEIGHT, HAS_BIAS, ONE_PLUS, C)
            dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
            kept = tl.load(kept_ptr + at, mask=mask, other=0.0)
            normed = _normed(kept, gain, bias, mean, rstd, bound, FROM_OUTPUT, CENTRED, HAS_WEIGHT, HAS_BIAS)
            if DWEIGHT:
                _add(dweight_ptr, cols, width, written, dy * normed)
            if DBIAS:
                _add(dbias_ptr, cols, width, written, dy)
            if DX:
                dx = dy * gain * rstd - normed * through_mean
                if CENTRED:
                    dx -= direct_mean
                _store_dx(dx_ptr, residual_ptr, at, mask, dx, RESIDUAL)
            start += C
        if DWEIGHT or DBIAS:
            # another thread may add to the sums that this one has written
            tl.debug_barrier()
        first += tl.num_programs(0) * R


def _fake_bwd(
    dy: Tensor, kept: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, rstd: Tensor,
    width: int, from_output: bool, centred: bool, one_plus: bool, needed: list[bool],
    dresidual: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """dx, dweight, dbias; empty where not needed."""
    wanted = zip((kept, weight, bias), needed, strict=True)
    return [kept.new_empty(0) if x is None or not need else x.new_empty(x.shape) for x, need in wanted]


@traced(_fake_bwd)
def norm_bwd(
    dy: Tensor, kept: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, rstd: Tensor,
    width: int, from_output: bool, centred: bool, one_plus: bool, needed: list[bool],
    dresidual: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """dx, dweight and dbias of a norm over the last `width` elements: LayerNorm if `centred`, otherwise RMSNorm.

    `kept` is the norm's input (LayerNorm's comes with a mean) or its output. dx is added to `dresidual`, in its shape.
    """
    out = _fake_bwd(dy, kept, weight, bias, mean, rstd, width, from_output, centred, one_plus, needed)
    want = [need and x is not None for x, need in zip((kept, weight, bias), needed, strict=True)]
    if kept.numel() == 0:
        return [x.zero_() for x in out]
    rows = kept.numel() // width
    dy, kept = dy.contiguous(), kept.contiguous()
    kernel, (R, C, warps) = _norm_bwd_kernel, row_tile(width)
    # LayerNorm holds a second sum over the rows
    widest = WIDEST_SUMS // 2 if centred else WIDEST_SUMS
    if widest < C:
        kernel, R, C, warps = _wide_norm_bwd_kernel, *WIDE_TILE
    count = programs(kept, cdiv(rows, R), warps)
    partial = [kept.new_empty((count, width) if wanted else 0, dtype=torch.float32) for wanted in want[1:]]
    affine = [kept if x is None else x.contiguous() for x in (weight, bias)]
    with on(kept):
        kernel[(count,)](
            dy, kept, *affine, rstd if mean is None else mean.contiguous(), rstd.contiguous(),
            kept if dresidual is None else dresidual.contiguous(), out[0], *partial, rows, width, width**0.5,
            FROM_OUTPUT=from_output, CENTRED=centred, HAS_WEIGHT=weight is not None,
            HAS_BIAS=from_output and bias is not None, ONE_PLUS=one_plus, RESIDUAL=dresidual is not None,
            DX=want[0], DWEIGHT=want[1], DBIAS=want[2], R=R, C=C, num_warps=warps, **STRICT,
        )  # fmt: skip
    sums = [p.sum(0).view(x.shape).to(x.dtype) if p.numel() else x for p, x in zip(partial, out[1:], strict=True)]
    return [out[0], *sums]


def layer_norm_bwd(
    dy: Tensor,
    x: Tensor,
    shape: _Shape,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    needed: tuple[bool, bool, bool],
    dresidual: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx, dweight, dbias; None for those not `needed`. dx is added to `dresidual`, x's other gradient."""
    width = math.prod(shape)
    if width > WIDEST_ROW:
        return reference.layer_norm_bwd(dy, x, shape, mean, rstd, weight, bias, needed, dresidual)
    grads = norm_bwd(dy, x, weight, bias, mean, rstd, width, False, True, False, list(needed), dresidual)
    return present(grads, (x, weight, bias), needed)


def present(grads: list[Tensor], inputs: tuple[Tensor | None, ...], needed: tuple[bool, ...]) -> Any:
    """The gradients, with None for those that are not needed or whose tensor does not exist."""
    wanted = zip(grads, inputs, needed, strict=True)
    return tuple(grad if need and x is not None else None for grad, x, need in wanted)


def samples(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> Iterator[tuple[Any, ...]]:
    """dy, x, mean, rstd, weight, bias."""
    x = 2.0 * torch.randn(rows, width, device=device) + 0.5
    # narrow rows can be nearly constant, so eps bounds rstd, as in a model
    mean = x.mean(-1, keepdim=True)
    rstd = ((x - mean).square().mean(-1, keepdim=True) + 0.1).rsqrt()
    weight, bias = (torch.randn(width, device=device).to(dtype) for _ in range(2))
    dy = torch.randn(x.shape, device=device)
    for affine in ((weight, bias), (weight, None), (None, None)):
        yield dy.to(dtype), x.to(dtype), mean, rstd, *affine


def _samples(*sizes: Any) -> Iterator[tuple[Any, ...]]:
    for dy, x, mean, rstd, weight, bias in samples(*sizes):
        # torch's CPU kernels want the statistics in x's dtype
        statistics = (s.to(x.dtype) if x.device.type == "cpu" else s for s in (mean, rstd))
        args = dy, x, (x.size(-1),), *statistics, weight, bias, (True, weight is not None, bias is not None)
        yield args
    # x has another gradient, to which dx is added
    yield *args, torch.randn(x.shape, device=x.device).to(x.dtype)


SAMPLES = {"layer_norm_bwd": _samples}
