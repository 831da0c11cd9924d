"""RMSNorm that keeps its output, which the next layer keeps anyway, instead of its input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...dispatch import implementation
from ...ops.first_order import once_differentiable
from ...records import applied, load, parameter, save, stored_exact
from .op_kept import keep_output


class RMSNormOutputFunction(torch.autograd.Function):
    """Variant "output": keeps y and rstd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, formula: str) -> Tensor:
        y, rstd = implementation("rms_norm_fwd", x, formula)(x, weight, eps, formula)
        save(ctx, keep_output(y), stored_exact(rstd), parameter(weight) if weight is not None else None)
        ctx.formula, ctx.x_dtype = formula, x.dtype
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        y, rstd, weight = load(ctx, dy)
        dx, dweight = implementation("rms_norm_output_bwd", dy, ctx.formula)(
            dy, y, weight, rstd, ctx.formula, ctx.needs_input_grad[:2]
        )
        return dx.to(ctx.x_dtype) if dx is not None else None, dweight, None, None


def rms_norm_output(x: Tensor, weight: Tensor | None, eps: float, formula: str = "weight_after_cast") -> Tensor:
    """RMSNorm over the last dimension whose backward starts from the output.

    Ask ``rms_norm_output_reasons(weight, formula)`` first: a channel with a tiny gain cannot be inverted.

    Args:
        x: ``[..., C]``, floating point.
        weight: ``[C]`` or None.
        eps: Added to the mean square.
        formula: A row of ``reference.RMS_NORM_FORMULAS``.

    Returns:
        ``[..., C]``, equal to the stock module's. It must not be written in place before backward.

    Saves:
        The output (shared with its consumers), rstd (fp32, one per row), the weight by reference.

    Gradient:
        Exact but for the rounding of y. There is no bias, so every channel with a normal weight is as accurate as y:
        in bf16 relative errors of dx and dweight like stock's own. A gain of exactly 0 gets no gradient.

    Source:
        Tempo's LayerNorm (arXiv 2210.10246), for RMSNorm.
    """
    return applied(RMSNormOutputFunction, x, weight, eps, formula)
