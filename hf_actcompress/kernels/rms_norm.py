"""RMSNorm: forward, rebuild and backward.

Forward and rebuild are bit-equal to the reference on one device: every step has one correctly rounded result, except
the mean of squares. One kernel sums it in the order of torch's reduction (ATen/native/cuda/Reduce.cuh), if a probe at
that width found torch's bits on the device; otherwise torch sums. The backward rounds once per result.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from ctypes import c_float
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compiling import is_compiling
from ..reference import rms_norm as reference
from .common import (
    DTYPES,
    POINTWISE_LAUNCH,
    POINTWISE_TILE,
    STRICT,
    WARPS_PER_PROCESSOR,
    WIDEST_ROW,
    cast,
    cdiv,
    on,
    programs,
    row_tile,
    traced,
)
from .launch import CachedLaunches
from .layer_norm import norm_bwd, present

_HALF = (torch.float16, torch.bfloat16)
_log = logging.getLogger(__name__)
# (device, dtype, width, (lanes, warps) of a row) -> whether a probe found torch's bits
_repeats: dict[tuple[torch.device, torch.dtype, int, tuple[int, int]], bool] = {}
# bytes of the rows that a multiprocessor's warps go through at a time: its caches hold them until the second read
_CACHED_BYTES = 96 * 1024


@CachedLaunches
@triton.jit
def _square_kernel(x_ptr, square_ptr, count, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + at, mask=at < count).to(tl.float32)
    tl.store(square_ptr + at, x * x, mask=at < count)


@triton.jit
def _scaled(
    x, rstd, weight_ptr, cols, inside, dtype: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, ONE_PLUS: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """y in its dtype, from x [R, C] in fp32 and rstd [R, 1]."""
    y = x * rstd
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=inside).to(tl.float32)
        if ONE_PLUS:
            weight = 1.0 + weight
        y = cast(y, NORMED).to(tl.float32) * weight[None, :]
    return cast(y, dtype)


@CachedLaunches
@triton.jit
def _fwd_kernel(
    x_ptr, weight_ptr, y_ptr, rstd_ptr, rows, width, factor, eps,
    HAS_WEIGHT: tl.constexpr, ONE_PLUS: tl.constexpr, NORMED: tl.constexpr, UNROLLED: tl.constexpr,
    R: tl.constexpr, LANES: tl.constexpr, LOG_LANES: tl.constexpr, WARPS: tl.constexpr, LOG_WARPS: tl.constexpr,
):  # fmt: skip
    """Writes y [rows, width] and rstd [rows]; the second read of x goes from its end, and finds it in a cache.

    The order of the sum: LANES * WARPS of torch's threads share a row. Each thread takes four elements at a time, with
    a sum for each of the four, and adds these four in turn. In each warp the upper half of the lanes is added to the
    lower half until one lane is left; then the warps are added in the same way.
    """
    C: tl.constexpr = 4 * LANES * WARPS
    first = tl.program_id(0) * R
    while first < rows:
        row = (first + tl.arange(0, R)).to(tl.int64)
        held = (row < rows)[:, None]
        sums = tl.zeros([R, C], tl.float32)
        start = 0
        while start < width:
            for i in tl.static_range(UNROLLED):
                cols = start + i * C + tl.arange(0, C)
                mask = held & (cols < width)[None, :]
                x = tl.load(x_ptr + row[:, None] * width + cols[None, :], mask=mask, other=0.0).to(tl.float32)
                sums += x * x
            start += UNROLLED * C
        even, odd = tl.split(tl.reshape(sums, [R, LANES * WARPS, 2, 2]))
        sum0, sum2 = tl.split(even)
        sum1, sum3 = tl.split(odd)
        total = sum0 + sum1 + sum2 + sum3
        # a sum of two numbers has only one order
        for i in tl.static_range(LOG_LANES):
            total = tl.sum(tl.reshape(total, [R * WARPS, 2, LANES >> (i + 1)]), axis=1)
        for i in tl.static_range(LOG_WARPS):
            total = tl.sum(tl.reshape(total, [R, 2, WARPS >> (i + 1)]), axis=1)
        rstd = tl.rsqrt(total * factor + eps)
        tl.store(rstd_ptr + row[:, None], rstd, mask=held)
        while start > 0:
            start -= C
            cols = start + tl.arange(0, C)
            mask = held & (cols < width)[None, :]
            at = row[:, None] * width + cols[None, :]
            x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
            y = _scaled(x, rstd, weight_ptr, cols, cols < width, y_ptr.dtype.element_ty, HAS_WEIGHT, ONE_PLUS, NORMED)
            tl.store(y_ptr + at, y, mask=mask)
        first += tl.num_programs(0) * R


@CachedLaunches
@triton.jit
def _rebuild_kernel(
    x_ptr, rstd_ptr, weight_ptr, y_ptr, rows, width,
    HAS_WEIGHT: tl.constexpr, ONE_PLUS: tl.constexpr, NORMED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Writes y [rows, width]. NORMED: the dtype to which x^ is rounded before the gain multiplies it."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    cols = tl.arange(0, C)
    mask = (row < rows)[:, None] & (cols < width)[None, :]
    at = row[:, None] * width + cols[None, :]
    rstd = tl.load(rstd_ptr + row, mask=row < rows)[:, None]
    x = tl.load(x_ptr + at, mask=mask).to(tl.float32)
    y = _scaled(x, rstd, weight_ptr, cols, cols < width, y_ptr.dtype.element_ty, HAS_WEIGHT, ONE_PLUS, NORMED)
    tl.store(y_ptr + at, y, mask=mask)


def _normed_dtype(x: Tensor, weight: Tensor | None, formula: str) -> torch.dtype:
    """The dtype of x^ when the gain multiplies it."""
    if weight is None or formula in ("one_plus_weight", "weight_in_fp32"):
        return torch.float32
    dtype = weight.dtype if formula == "cast_to_weight" else x.dtype
    return dtype if dtype in _HALF else torch.float32


def _y_dtype(x: Tensor, weight: Tensor | None, formula: str) -> torch.dtype:
    if weight is None or formula in ("one_plus_weight", "weight_in_fp32"):
        return x.dtype
    return torch.promote_types(_normed_dtype(x, weight, formula), weight.dtype)


@traced(lambda x: x.new_empty(x.shape, dtype=torch.float32))
def _rms_norm_square(x: Tensor) -> Tensor:
    square = x.new_empty(x.shape, dtype=torch.float32)
    if x.numel():
        with on(x):
            _square_kernel[(cdiv(x.numel(), POINTWISE_TILE),)](x, square, x.numel(), **POINTWISE_LAUNCH)
    return square


def _reduction_block(rows: int, width: int) -> tuple[int, int]:
    """(lanes, warps) that share a row when torch's kernel sums [rows, width] in fp32 over rows, four at a time."""
    # blocks of 512 threads, warps of 32
    across, down = (min(1 << (n.bit_length() - 1), 512) for n in (width // 4, rows))
    height = min(down, 512 // min(across, 32))
    lanes = min(across, 512 // height)
    # all warps share a long row; otherwise each warp has its own row
    return lanes, height if cdiv(width, lanes) >= min(16 * height, 256) else 1


def _repeats_torch(x: Tensor) -> bool:
    """Whether the one kernel has the bits of torch's reduction for x; it is probed when such an x comes first."""
    width = x.size(-1) if x.dim() else 0
    # for other rows torch's loads are not of four elements, or not aligned to four
    fits = 128 <= width <= WIDEST_ROW and width % 4 == 0 and x.numel() > 0
    if not x.is_cuda or not fits or not x.is_contiguous() or is_compiling():
        return False
    rows = x.numel() // width
    key = x.device, x.dtype, width, _reduction_block(rows, width)
    if key not in _repeats:
        if torch.cuda.is_current_stream_capturing():
            return False
        _repeats[key] = _probe_order(x.device, x.dtype, rows, width)
    return _repeats[key]


def _probe_order(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> bool:
    """Compare with torch on rows of several magnitudes. More rows than 16 do not change the order of the sum."""
    x = torch.randn(min(rows, 128), width, device=device, generator=torch.Generator(device).manual_seed(0))
    for magnitude in (1e-3, 1.0, 30.0):
        scaled = (x * magnitude).to(dtype)
        expected = torch.rsqrt(scaled.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        try:
            same = torch.equal(_rms_norm_fwd(scaled, None, 1e-6, "weight_in_fp32")[1], expected)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            _log.warning("RMSNorm in one kernel does not run on %s: %s; it runs in passes", device, error)
            return False
        if not same:
            _log.info("torch sums %d elements in another order on %s; RMSNorm runs in passes", width, device)
            return False
    return True


def _rms_norm_fwd(x: Tensor, weight: Tensor | None, eps: float, formula: str) -> tuple[Tensor, Tensor]:
    """y and rstd in one kernel, for an x that `_repeats_torch` accepts."""
    y, rstd = _fake_rebuild(x, x, weight, formula), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    width, rows = x.size(-1), x.numel() // x.size(-1)
    lanes, warps = _reduction_block(rows, width)
    threads = lanes * warps
    R = max(512 // (4 * threads), 1)
    # counted as if each program had more warps, so that the rows in progress fit into the caches
    share = WARPS_PER_PROCESSOR * R * width * x.element_size() // _CACHED_BYTES
    with on(x):
        _fwd_kernel[(programs(x, cdiv(rows, R), max(share, 1)),)](
            x, x if weight is None else weight.contiguous(), y, rstd, rows, width,
            # torch's factor, computed in fp32
            c_float(rows).value / c_float(rows * width).value, eps,
            HAS_WEIGHT=weight is not None, ONE_PLUS=formula == "one_plus_weight",
            NORMED=DTYPES[_normed_dtype(x, weight, formula)], R=R,
            LANES=lanes, LOG_LANES=lanes.bit_length() - 1, WARPS=warps, LOG_WARPS=warps.bit_length() - 1,
            # a thread has eight elements at a time, and 64 bytes of loads in flight
            UNROLLED=8 // x.element_size(), num_warps=R * threads // 64, **STRICT,
        )  # fmt: skip
    return y, rstd


def rms_norm_fwd(x: Tensor, weight: Tensor | None, eps: float | None, formula: str) -> tuple[Tensor, Tensor]:
    """y and rstd [..., 1] in fp32; eps None means torch's default."""
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    if _repeats_torch(x):
        return _rms_norm_fwd(x, weight, eps, formula)
    # the order of torch's sum depends on the layout
    square = _rms_norm_square(x) if x.is_contiguous() else x.float().pow(2)
    rstd = torch.rsqrt(square.mean(-1, keepdim=True) + eps)
    return rms_norm_rebuild(x, rstd, weight, formula), rstd


def _fake_rebuild(x: Tensor, rstd: Tensor, weight: Tensor | None, formula: str) -> Tensor:
    return x.new_empty(x.shape, dtype=_y_dtype(x, weight, formula))


@traced(_fake_rebuild)
def _rms_norm_rebuild(x: Tensor, rstd: Tensor, weight: Tensor | None, formula: str) -> Tensor:
    y = _fake_rebuild(x, rstd, weight, formula)
    if x.numel() == 0:
        return y
    x, rstd, width = x.contiguous(), rstd.contiguous(), x.size(-1)
    rows, (R, C, warps) = x.numel() // width, row_tile(width)
    with on(x):
        _rebuild_kernel[(cdiv(rows, R),)](
            x, rstd, x if weight is None else weight.contiguous(), y, rows, width,
            HAS_WEIGHT=weight is not None, ONE_PLUS=formula == "one_plus_weight",
            NORMED=DTYPES[_normed_dtype(x, weight, formula)], R=R, C=C, num_warps=warps, **STRICT,
        )  # fmt: skip
    return y


def rms_norm_rebuild(x: Tensor, rstd: Tensor, weight: Tensor | None, formula: str) -> Tensor:
    """y from x and rstd, bit-equal to y of `rms_norm_fwd`."""
    if x.size(-1) > WIDEST_ROW:
        return reference.rms_norm_rebuild(x, rstd, weight, formula)
    return _rms_norm_rebuild(x, rstd, weight, formula)


def rms_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, formula: str, needed: tuple[bool, bool],
    dresidual: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """dx like x and dweight [C]; None for those not `needed`. dx is added to `dresidual`, x's other gradient."""
    if x.size(-1) > WIDEST_ROW:
        return reference.rms_norm_bwd(dy, x, weight, rstd, formula, needed, dresidual)
    one_plus = formula == "one_plus_weight"
    grads = norm_bwd(dy, x, weight, None, None, rstd, x.size(-1), False, False, one_plus, [*needed, False], dresidual)
    return present(grads[:2], (x, weight), needed)


def _samples(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> Iterator[tuple[Any, ...]]:
    x, rstd = torch.randn(rows, width, device=device).to(dtype), torch.rand(rows, 1, device=device) + 0.5
    yield x, rstd, None, "weight_in_fp32"
    for formula in ("weight_after_cast", "one_plus_weight", "cast_to_weight", "weight_in_fp32"):
        for weight_dtype in (dtype, torch.bfloat16 if dtype == torch.float32 else torch.float32):
            yield x, rstd, torch.randn(width, device=device).to(weight_dtype), formula


def _sample_fwd(*sizes: Any) -> Iterator[tuple[Any, ...]]:
    yield from ((x, weight, 1e-6, formula) for x, _, weight, formula in _samples(*sizes))


def _sample_bwd(*sizes: Any) -> Iterator[tuple[Any, ...]]:
    for x, rstd, weight, formula in _samples(*sizes):
        dy = torch.randn(x.shape, device=x.device).to(_y_dtype(x, weight, formula))
        yield dy, x, weight, rstd, formula, (True, True)
    # x has another gradient, to which dx is added
    yield dy, x, weight, rstd, formula, (True, True), torch.randn(x.shape, device=x.device).to(x.dtype)


# kernels that replace a function only where a probe allows it; they are compiled ahead of time with its samples
ON_TRIAL = {"rms_norm_fwd": _rms_norm_fwd}
SAMPLES = {"rms_norm_fwd": _sample_fwd, "rms_norm_rebuild": _samples, "rms_norm_bwd": _sample_bwd}
