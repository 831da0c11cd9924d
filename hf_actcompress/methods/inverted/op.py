"""Pointwise activations that keep their output, which the next layer keeps anyway, and one bit per element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...dispatch import implementation
from ...errors import UnknownOptionError
from ...ops.first_order import once_differentiable
from ...records import applied, load, save, stored_exact
from ..norm_output.op import keep_output
from .reference import INVERTED


class ActivationOutputFunction(torch.autograd.Function):
    """Variant "output": keeps y and the branch of each element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stock: Callable[[Tensor], Tensor], kind: str) -> Tensor:
        y: Tensor = implementation("activation_fwd", x, kind)(x, stock, kind)
        bits = implementation("activation_output_bits", x, kind)(x, kind)
        save(ctx, keep_output(y), stored_exact(bits))
        ctx.kind, ctx.x_dtype = kind, x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        y, bits = load(ctx, dy)
        dx = implementation("activation_output_bwd", dy, ctx.kind)(dy, y, bits, ctx.kind)
        return dx.to(ctx.x_dtype), None, None


def activation_output(x: Tensor, stock: Callable[[Tensor], Tensor], kind: str) -> Tensor:
    """An activation with one minimum (GELU, SiLU, Mish) that keeps its output, and on which side of the minimum x was.

    This saves memory where the next layer keeps the output, too (a linear layer with a trainable weight). Elsewhere it
    keeps one bit per element more than stock.

    Args:
        x: Pre-activation, any shape, floating point.
        stock: The stock forward; its values are returned unchanged.
        kind: A row of ``INVERTED``: gelu, gelu_tanh, gelu_new, quick_gelu, silu, mish.

    Returns:
        ``stock(x)``. It must not be written in place before backward.

    Saves:
        The output (shared with its consumers) and 1/8 byte per element.

    Gradient:
        f' from y by polynomials: off by at most 2e-5 in exact arithmetic. What remains is what rounding y loses near
        the minimum. Root mean square error of f' for x ~ N(0, 1), and maximum: fp32 4e-6 (1.6e-4), fp16 4.6e-4 (7e-3),
        bf16 1.9e-3 (1.5e-2), as with the exact inverse; 2.4e-3 (2.2e-2) for bf16 quick_gelu, whose stock forward rounds
        twice. Rounding x to bf16 costs as much. For |x| > 6 the error is less than 2e-4.

    Raises:
        UnknownOptionError: No table for that kind.

    Source:
        Tempo (arXiv 2210.10246), Inverted Activations (arXiv 2407.15545); the fits are our own
        (recipes/fit_inverted_activations.py).
    """
    if kind not in INVERTED:
        raise UnknownOptionError("activation that can be inverted", kind, INVERTED)
    return applied(ActivationOutputFunction, x, stock, kind)
