"""h = act(gate) * up rebuilt for backward, and dgate and dup from dh: each in one pass, or all in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import OPTIONS, STOCKS, constants, derivative, inputs, is_fast, value
from .common import DTYPES, POINTWISE_LAUNCH, POINTWISE_TILE, cast, cdiv, on, pointwise_layout, traced
from .launch import CachedLaunches


@CachedLaunches
@triton.jit
def _product_kernel(
    gate_ptr, up_ptr, h_ptr, gate_stride, up_stride, width, tiles,
    KIND: tl.constexpr, A: tl.constexpr, B: tl.constexpr, ACTIVATED: tl.constexpr, FAST: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Writes h [rows, width], dense; rows of gate and up are `*_stride` apart. ACTIVATED: act(gate)'s stock dtype."""
    row = (tl.program_id(0) // tiles).to(tl.int64)
    at = (tl.program_id(0) % tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = at < width
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + at, mask=mask).to(tl.float32)
    activated = cast(value(gate, KIND, A, B, FAST), ACTIVATED).to(tl.float32)
    tl.store(h_ptr + row * width + at, cast(activated * up, h_ptr.dtype.element_ty), mask=mask)


@CachedLaunches
@triton.jit
def _bwd_kernel(
    dh_ptr, gate_ptr, up_ptr, h_ptr, dgate_ptr, dup_ptr, dh_stride, gate_stride, up_stride, width, tiles,
    KIND: tl.constexpr, A: tl.constexpr, B: tl.constexpr, REBUILD: tl.constexpr, ACTIVATED: tl.constexpr,
    FAST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Writes dgate and dup [rows, width], dense, and h if it is rebuilt; h may be the memory of dh."""
    row = (tl.program_id(0) // tiles).to(tl.int64)
    at = (tl.program_id(0) % tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = at < width
    dh = tl.load(dh_ptr + row * dh_stride + at, mask=mask).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + at, mask=mask).to(tl.float32)
    activated = value(gate, KIND, A, B, FAST)
    dup = dh * activated
    dgate = dh * up * derivative(gate, KIND, A, B, FAST, gate_ptr.dtype.element_ty)
    tl.store(dup_ptr + row * width + at, cast(dup, dup_ptr.dtype.element_ty), mask=mask)
    tl.store(dgate_ptr + row * width + at, cast(dgate, dgate_ptr.dtype.element_ty), mask=mask)
    if REBUILD:
        h = cast(activated, ACTIVATED).to(tl.float32) * up
        # all threads have read dh before one writes h over it
        tl.debug_barrier()
        tl.store(h_ptr + row * width + at, cast(h, h_ptr.dtype.element_ty), mask=mask)


def _activated_dtype(gate: Tensor, up: Tensor, dtype: torch.dtype) -> Any:
    """Stock's dtype of act(gate): if the product is wider than both factors, the activation was, too."""
    widened = torch.promote_types(gate.dtype, up.dtype) != dtype
    return DTYPES[dtype if widened else gate.dtype]


@traced(lambda gate, up, kind, options, dtype: gate.new_empty(gate.shape, dtype=dtype))
def _gated_product(gate: Tensor, up: Tensor, kind: str, options: list[float], dtype: torch.dtype) -> Tensor:
    h = gate.new_empty(gate.shape, dtype=dtype)
    if h.numel() == 0:
        return h
    activated = _activated_dtype(gate, up, dtype)
    (gate, up), rows, width = pointwise_layout(gate, up)
    low, high = constants(kind, options)
    tiles = cdiv(width, POINTWISE_TILE)
    with on(gate):
        _product_kernel[(rows * tiles,)](
            gate, up, h, gate.stride(0), up.stride(0), width, tiles,
            KIND=kind, A=low, B=high, ACTIVATED=activated, FAST=is_fast(h), **POINTWISE_LAUNCH,
        )  # fmt: skip
    return h


def gated_product(
    gate: Tensor,
    up: Tensor,
    stock: Callable[[Tensor], Tensor],
    kind: str,
    options: tuple[float, ...],
    dtype: torch.dtype,
) -> Tensor:
    """act(gate) * up in `dtype`, rounded at the steps at which stock rounds; `kind` is the formula of act."""
    return _gated_product(gate, up, kind, list(options), dtype)


def _fake_bwd(dh: Tensor, gate: Tensor, up: Tensor, kind: str, options: list[float]) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


@traced(_fake_bwd)
def _gated_product_bwd(dh: Tensor, gate: Tensor, up: Tensor, kind: str, options: list[float]) -> tuple[Tensor, Tensor]:
    return _launch_bwd(dh, None, gate, up, kind, options)


def _launch_bwd(
    dh: Tensor, h: Tensor | None, gate: Tensor, up: Tensor, kind: str, options: list[float]
) -> tuple[Tensor, Tensor]:
    """Return dgate and dup, and write h if there is one."""
    dgate, dup = _fake_bwd(dh, gate, up, kind, options)
    if dh.numel() == 0:
        return dgate, dup
    activated = None if h is None else _activated_dtype(gate, up, h.dtype)
    fast = is_fast(dgate, dup) if h is None else is_fast(h, dgate, dup)
    (dh, gate, up), rows, width = pointwise_layout(dh, gate, up)
    low, high = constants(kind, options)
    tiles = cdiv(width, POINTWISE_TILE)
    with on(gate):
        _bwd_kernel[(rows * tiles,)](
            dh, gate, up, gate if h is None else h, dgate, dup,
            dh.stride(0), gate.stride(0), up.stride(0), width, tiles,
            KIND=kind, A=low, B=high, REBUILD=h is not None, ACTIVATED=activated, FAST=fast,
            **POINTWISE_LAUNCH,
        )  # fmt: skip
    return dgate, dup


def gated_product_bwd(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    stock: Callable[[Tensor], Tensor],
    kind: str,
    options: tuple[float, ...],
) -> tuple[Tensor, Tensor]:
    """dgate and dup from dh, all [..., F]."""
    return _gated_product_bwd(dh, gate, up, kind, list(options))


@traced(lambda dh, h, *args: _fake_bwd(dh, *args), mutates=("h",))
def _gated_product_and_bwd(
    dh: Tensor, h: Tensor, gate: Tensor, up: Tensor, kind: str, options: list[float]
) -> tuple[Tensor, Tensor]:
    """Write h, and return dgate and dup. h is dense and may be the memory of dh."""
    return _launch_bwd(dh, h, gate, up, kind, options)


def gated_product_and_bwd(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    stock: Callable[[Tensor], Tensor],
    kind: str,
    options: tuple[float, ...],
    dtype: torch.dtype,
    owned: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """act(gate) * up in `dtype`, dgate and dup. If dh is `owned` by this call, h may be written over it."""
    reused = owned and dh.dtype == dtype and dh.is_contiguous()
    # a second tensor object on dh's memory, because the operator reads dh and writes h
    h = dh.view_as(dh) if reused else gate.new_empty(gate.shape, dtype=dtype)
    dgate, dup = _gated_product_and_bwd(dh, h, gate, up, kind, list(options))
    return h, dgate, dup


def _sample_product(*sizes: Any) -> Iterator[tuple[Any, ...]]:
    for kind, stock in STOCKS.items():
        yield inputs(*sizes), inputs(*sizes), stock, kind, OPTIONS.get(kind, ()), sizes[1]


def _sample_bwd(*sizes: Any) -> Iterator[tuple[Any, ...]]:
    for gate, up, stock, kind, options, dtype in _sample_product(*sizes):
        yield torch.randn(gate.shape, device=gate.device).to(dtype), gate, up, stock, kind, options


def _sample_all(*sizes: Any) -> Iterator[tuple[Any, ...]]:
    yield from ((*args, sizes[1], False) for args in _sample_bwd(*sizes))


SAMPLES = {
    "gated_product": _sample_product,
    "gated_product_and_bwd": _sample_all,
    "gated_product_bwd": _sample_bwd,
}
