"""Norms that keep their output, which the next layer keeps anyway, instead of their input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...codecs import IDENTITY
from ...compiling import is_compiling
from ...dispatch import implementation
from ...ops._activation import itself
from ...ops.autocast import autocast_widens, in_fp32
from ...ops.first_order import once_differentiable
from ...records import Record, applied, declare, keep, load, parameter, save, stored_exact

_Shape = tuple[int, ...]


def keep_output(y: Tensor, *, rows: bool = True) -> Record:
    """The record of y, to be saved by the op that returns y; `rows`: whether its backward treats each row by itself.

    y is declared to be this record, so that consumers keep the same bytes and no others: they do not store y through
    their own codec, and a cast of y is derived instead of kept in addition.
    """
    if is_compiling():
        return stored_exact(y)
    # an alias: the entry must not hold the tensor that it describes
    record = keep(y, IDENTITY) if rows else stored_exact(y.detach())
    declare(y, itself, record)
    return record


class LayerNormOutputFunction(torch.autograd.Function):
    """Variant "output": keeps y and rstd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: _Shape, eps: float) -> Tensor:
        wide = autocast_widens(x)
        inputs = in_fp32(x, weight, bias) if wide else (x, weight, bias)
        y, _, rstd = implementation("layer_norm_fwd", x)(inputs[0], shape, *inputs[1:], eps)
        affine = [parameter(t) if t is not None else None for t in (weight, bias)]
        save(ctx, keep_output(y, rows=x.dim() > len(shape) + 1), stored_exact(rstd), *affine)
        ctx.shape, ctx.x_dtype = shape, x.dtype
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        y, rstd, weight, bias = load(ctx, dy)
        dx, dweight, dbias = implementation("layer_norm_output_bwd", dy)(
            dy, y, ctx.shape, rstd, weight, bias, ctx.needs_input_grad[:3]
        )
        return dx.to(ctx.x_dtype) if dx is not None else None, dweight, dbias, None, None


def layer_norm_output(
    x: Tensor, shape: _Shape, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """LayerNorm over the last ``len(shape)`` dimensions whose backward starts from the output.

    Ask ``layer_norm_output_reasons(weight, bias)`` first: a channel with a tiny weight or a bias much larger than its
    weight cannot be inverted.

    Args:
        x: ``[..., *shape]``, floating point.
        shape: The normalised dimensions.
        weight, bias: ``shape`` or None.
        eps: Added to the variance.

    Returns:
        Like x, equal to stock's; fp32 under autocast on an accelerator. Not to be written in place before backward.

    Saves:
        The output (shared with its consumers), rstd (one per row); the affine parameters by reference.

    Gradient:
        Exact but for the rounding of y: x^ inherits its error, enlarged by |bias / weight|. Relative error with weights
        in 1 +- 0.1 and biases of 0.1: dx like stock's (1.7e-3 in bf16), dweight 1.6e-3; with |bias / weight| up to 10,
        dx 2e-3 and the worst channel's weight gradient 5%. A weight of exactly 0 gets no gradient.

    Source:
        Tempo (arXiv 2210.10246).
    """
    return applied(LayerNormOutputFunction, x, weight, bias, shape, eps)


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
