"""Liger's kernels for the same results from the same tensors, as far as Liger has them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from .bench_kernel_cases import Args, Case


def liger(case: Case, args: Args) -> Callable[[], Any] | None:
    """Liger's kernel for the same result from the same tensors, or None. Some of them write into their arguments."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    of_liger = {
        "rms_norm_fwd": _liger_rms_norm_fwd,
        "rms_norm_bwd": _liger_rms_norm_bwd,
        "layer_norm_bwd": _liger_layer_norm_bwd,
        "gated_product": _liger_gated_product,
        "gated_product_fwd": _liger_gated_product,
        "gated_product_bwd": _liger_gated_product_bwd,
        "activation_bwd": _liger_activation_bwd,
        "rope_fwd": _liger_rope_fwd,
        "rope_bwd": _liger_rope_bwd,
        "linear_cross_entropy_bwd": _liger_loss_head,
    }
    return of_liger[case.name](*args) if case.name in of_liger else None


def _liger(name: str) -> Any:
    return importlib.import_module(f"liger_kernel.ops.{name}")


def _liger_rms_norm_fwd(x: Any, weight: Any, eps: float, formula: str) -> Callable[[], Any]:
    forward = _liger("rms_norm").rms_norm_forward
    return lambda: forward(x, weight, eps, 0.0, "llama", None)


def _liger_rms_norm_bwd(dy: Any, x: Any, weight: Any, rstd: Any, *_: Any) -> Callable[[], Any]:
    of_liger = _liger("rms_norm")
    _, _, rstd, *launch, mode = of_liger.rms_norm_forward(x, weight, 1e-6, 0.0, "llama", None)
    return lambda: of_liger.rms_norm_backward(dy, x, weight, rstd, 0.0, mode, *launch, False, None)


def _liger_layer_norm_bwd(dy: Any, x: Any, *rest: Any) -> Callable[[], Any] | None:
    weight, bias = rest[-3:-1]
    if weight is None or bias is None:
        return None
    of_liger = _liger("layer_norm")
    _, _, mean, rstd, *_ = of_liger.layer_norm_forward(x, weight, bias, 1e-5)
    return lambda: of_liger.layer_norm_backward(dy, x, weight, bias, mean, rstd)


def _liger_gated_product(gate: Any, up: Any, *_: Any) -> Callable[[], Any]:
    forward = _liger("swiglu").swiglu_forward
    return lambda: forward(gate, up)


def _liger_gated_product_bwd(dh: Any, gate: Any, up: Any, stock: Any, kind: str, _: Any) -> Callable[[], Any]:
    gate, up = gate.clone(), up.clone()
    backward = _liger("swiglu").swiglu_backward if kind == "silu" else _liger("geglu").geglu_backward
    return lambda: backward(gate, up, dh)


def _liger_activation_bwd(dy: Any, x: Any, kind: str, _: Any) -> Callable[[], Any] | None:
    if kind != "relu_squared" or importlib.util.find_spec("liger_kernel.ops.relu_squared") is None:
        return None
    backward = _liger("relu_squared").relu_squared_backward
    return lambda: backward(x, dy)


def _liger_rope_fwd(q: Any, k: Any, cos: Any, sin: Any) -> Callable[[], Any]:
    # this kernel rotates its arguments in place: each call does the same work on other values
    q, k, forward = q.clone(), k.clone(), _liger("rope").rope_forward
    return lambda: forward(q, k, cos[:, 0], sin[:, 0])


def _liger_rope_bwd(q: Any, k: Any, cos: Any, sin: Any) -> Callable[[], Any]:
    q, k, backward = q.clone(), k.clone(), _liger("rope").rope_backward
    return lambda: backward(q, k, cos[:, 0], sin[:, 0])


def _liger_loss_head(h: Any, weight: Any, bias: Any, target: Any, *_: Any) -> Callable[[], Any]:
    forward = _liger("fused_linear_cross_entropy").LigerFusedLinearCrossEntropyFunction.apply
    leaves = h.detach().requires_grad_(), weight.detach().requires_grad_()

    def run() -> Any:
        with torch.enable_grad():
            # newer versions return more than the loss
            return torch.autograd.grad(_first(forward(*leaves, target)), leaves)

    return run


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result
