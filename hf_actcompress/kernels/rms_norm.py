"""RMSNorm: forward, rebuild and backward.

Forward and rebuild are bit-equal to the reference on the same device: the mean of squares is torch's own (its order of
summation is not ours to copy), and every step of the kernels has one correctly rounded result. The backward computes in
fp32 and rounds once per result, where the reference rounds as stock's graph does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import rms_norm as reference
from .common import DTYPES, POINTWISE_TILE, POINTWISE_WARPS, STRICT, WIDEST_ROW, cast, on, row_tile, traced
from .layer_norm import norm_bwd, present

_HALF = (torch.float16, torch.bfloat16)


@triton.jit
def _square_kernel(x_ptr, square_ptr, count, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + at, mask=at < count).to(tl.float32)
    tl.store(square_ptr + at, x * x, mask=at < count)


@triton.jit
def _rebuild_kernel(
    x_ptr, rstd_ptr, weight_ptr, y_ptr, rows, width,
    HAS_WEIGHT: tl.constexpr, ONE_PLUS: tl.constexpr, NORMED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """y [rows, width]; NORMED is the dtype to which x^ is rounded before the gain."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    cols = tl.arange(0, C)
    mask = (row < rows)[:, None] & (cols < width)[None, :]
    at = row[:, None] * width + cols[None, :]
    rstd = tl.load(rstd_ptr + row, mask=row < rows)
    y = tl.load(x_ptr + at, mask=mask).to(tl.float32) * rstd[:, None]
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < width).to(tl.float32)
        if ONE_PLUS:
            weight = 1.0 + weight
        y = cast(y, NORMED).to(tl.float32) * weight[None, :]
    tl.store(y_ptr + at, cast(y, y_ptr.dtype.element_ty), mask=mask)


def _normed_dtype(x: Tensor, weight: Tensor | None, variant: str) -> torch.dtype:
    """The dtype in which x^ meets the gain."""
    if weight is None or variant in ("one_plus_weight", "weight_in_fp32"):
        return torch.float32
    if variant == "cast_to_weight":
        return weight.dtype if weight.dtype in _HALF else torch.float32
    return x.dtype


def _y_dtype(x: Tensor, weight: Tensor | None, variant: str) -> torch.dtype:
    if weight is None or variant in ("one_plus_weight", "weight_in_fp32"):
        return x.dtype
    return torch.promote_types(_normed_dtype(x, weight, variant), weight.dtype)


def _fake_square(x: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


@traced(_fake_square)
def _rms_norm_square(x: Tensor) -> Tensor:
    square = _fake_square(x)
    if x.numel():
        with on(x):
            grid = (triton.cdiv(x.numel(), POINTWISE_TILE),)
            _square_kernel[grid](x, square, x.numel(), TILE=POINTWISE_TILE, num_warps=POINTWISE_WARPS, **STRICT)
    return square


def rms_norm_fwd(x: Tensor, weight: Tensor | None, eps: float | None, variant: str) -> tuple[Tensor, Tensor]:
    """y and rstd [..., 1] in fp32; eps None is torch's default."""
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    # torch sums in an order that depends on the layout
    square = _rms_norm_square(x) if x.is_contiguous() else x.float().pow(2)
    rstd = torch.rsqrt(square.mean(-1, keepdim=True) + eps)
    return rms_norm_rebuild(x, rstd, weight, variant), rstd


def _fake_rebuild(x: Tensor, rstd: Tensor, weight: Tensor | None, variant: str) -> Tensor:
    return x.new_empty(x.shape, dtype=_y_dtype(x, weight, variant))


@traced(_fake_rebuild)
def _rms_norm_rebuild(x: Tensor, rstd: Tensor, weight: Tensor | None, variant: str) -> Tensor:
    y = _fake_rebuild(x, rstd, weight, variant)
    if x.numel() == 0:
        return y
    x, rstd, width = x.contiguous(), rstd.contiguous(), x.size(-1)
    rows = x.numel() // width
    R, C, warps = row_tile(width)
    with on(x):
        _rebuild_kernel[(triton.cdiv(rows, R),)](
            x, rstd, x if weight is None else weight.contiguous(), y, rows, width,
            HAS_WEIGHT=weight is not None, ONE_PLUS=variant == "one_plus_weight",
            NORMED=DTYPES[_normed_dtype(x, weight, variant)], R=R, C=C, num_warps=warps, **STRICT,
        )  # fmt: skip
    return y


def rms_norm_rebuild(x: Tensor, rstd: Tensor, weight: Tensor | None, variant: str) -> Tensor:
    """y from x and rstd, bit-equal to `rms_norm_fwd`."""
    if x.size(-1) > WIDEST_ROW:
        return reference.rms_norm_rebuild(x, rstd, weight, variant)
    y: Tensor = _rms_norm_rebuild(x, rstd, weight, variant)
    return y


def rms_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, variant: str, needed: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """dx like x and dweight [C], from dy [..., C]; those not `needed` are None."""
    if x.size(-1) > WIDEST_ROW:
        return reference.rms_norm_bwd(dy, x, weight, rstd, variant, needed)
    one_plus = variant == "one_plus_weight"
    grads = norm_bwd(dy, x, weight, None, None, rstd, x.size(-1), False, False, one_plus, [*needed, False])
    dx, dweight, _ = present(grads, (x, weight, None), (*needed, False))
    return dx, dweight


def _samples(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> Iterator[tuple[Any, ...]]:
    x, rstd = torch.randn(rows, width, device=device).to(dtype), torch.rand(rows, 1, device=device) + 0.5
    yield x, rstd, None, "weight_in_fp32"
    for variant in ("weight_after_cast", "one_plus_weight", "cast_to_weight", "weight_in_fp32"):
        for weight_dtype in (dtype, torch.bfloat16 if dtype == torch.float32 else torch.float32):
            yield x, rstd, torch.randn(width, device=device).to(weight_dtype), variant


def _sample_fwd(*sizes: Any) -> Iterator[tuple[Any, ...]]:
    yield from ((x, weight, 1e-6, variant) for x, _, weight, variant in _samples(*sizes))


def _sample_bwd(*sizes: Any) -> Iterator[tuple[Any, ...]]:
    for x, rstd, weight, variant in _samples(*sizes):
        dy = torch.randn(x.shape, device=x.device).to(_y_dtype(x, weight, variant))
        yield dy, x, weight, rstd, variant, (True, True)


SAMPLES = {"rms_norm_fwd": _sample_fwd, "rms_norm_rebuild": _samples, "rms_norm_bwd": _sample_bwd}
