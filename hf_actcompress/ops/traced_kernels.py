"""What patched modules call while a layer is traced: norms, activations and rotations as nodes (`kernel_nodes`), with
their gradients; None where the device has no kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .kernel_nodes import (
    ACTIVATED,
    ACTIVATED_BWD,
    GATED,
    GATED_BWD,
    NORM_BWD,
    NORM_BWD_BOTH,
    NORMED,
    ROTATED,
    ROTATED_BWD,
    RSTD,
    has_kernel,
    place_of,
)

_Stock = Callable[[Tensor], Tensor]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float | None, formula: str) -> Tensor:
        rstd = RSTD(x, weight, eps, formula)
        ctx.save_for_backward(x, weight, rstd)
        ctx.formula = formula
        return NORMED(x, rstd, weight, formula)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x, weight, rstd = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            return *NORM_BWD_BOTH(dy, x, weight, rstd, ctx.formula), None, None
        return NORM_BWD(dy, x, weight, rstd, ctx.formula), None, None, None


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return ROTATED(x, cos, sin)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        return ROTATED_BWD(dy, *ctx.saved_tensors, ctx.dtype), None, None


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *row: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.row = row
        return ACTIVATED(x, *row)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        return ACTIVATED_BWD(dy, *ctx.saved_tensors, *ctx.row[1:]), None, None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, *row: Any) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.row = row
        return GATED(gate, up, *row)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> Any:  # type: ignore[override]
        return *GATED_BWD(dh, *ctx.saved_tensors, *ctx.row), None, None, None


def rms_norm(x: Tensor, weight: Tensor | None, eps: float | None, formula: str) -> Tensor | None:
    """RMSNorm of x [..., C] as nodes, in a trace; None if the device has no kernel for it."""
    if not has_kernel("rms_norm_fwd", x, formula):
        return None
    return _RMSNorm.apply(x, weight, eps, formula)  # type: ignore[no-untyped-call, no-any-return]


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor] | None:
    """Queries and keys [B, H, S, D] or [B, S, H, D] rotated, each as one node; the angles broadcast to them."""
    if not has_kernel("rope_fwd", q):
        return None
    return _Rotated.apply(q, cos, sin), _Rotated.apply(k, cos, sin)  # type: ignore[no-untyped-call]


def activation(x: Tensor, stock: _Stock, kind: str, options: Sequence[float]) -> Tensor | None:
    """stock(x) as one node; `kind` and `options` are its row of `reference.ACTIVATIONS`."""
    if not has_kernel("activation_fwd", x, kind):
        return None
    return _Activated.apply(x, place_of(stock, x, kind, options), kind, list(options))  # type: ignore[no-untyped-call, no-any-return]


def gated_product(gate: Tensor, up: Tensor, stock: _Stock, kind: str, options: Sequence[float]) -> Tensor | None:
    """stock(gate) * up, all [..., F], as one node."""
    if not has_kernel("gated_product_fwd", gate, kind):
        return None
    return _Gated.apply(gate, up, place_of(stock, gate, kind, options), kind, list(options))  # type: ignore[no-untyped-call, no-any-return]
