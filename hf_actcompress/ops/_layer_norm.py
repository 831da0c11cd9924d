"""LayerNorm that keeps its input and statistics; the output is derived from them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..codecs import IDENTITY, Codec
from ..dispatch import implementation
from ..records import applied, declare, load, parameter, record_of, save, stored_exact, whole_record_of
from .autocast import autocast_widens, in_fp32
from .first_order import once_differentiable

_Shape = tuple[int, ...]


def _rebuild(x: Tensor, *affine: Tensor, shape: _Shape, eps: float, wide: bool, has_weight: bool) -> Tensor:
    weight = affine[0] if has_weight else None
    bias = affine[-1] if len(affine) > has_weight else None
    if wide:
        x, weight, bias = in_fp32(x, weight, bias)
    y: Tensor = implementation("layer_norm_fwd", x)(x, shape, weight, bias, eps)[0]
    return y


class LayerNormFunction(torch.autograd.Function):
    """Variant "input": keeps x, mean, rstd; rebuilds y."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shape: _Shape,
        eps: float,
        codec: Codec,
        copy: bool,
    ) -> Tensor:
        wide = autocast_widens(x)
        inputs = in_fp32(x, weight, bias) if wide else (x, weight, bias)
        y, mean, rstd = implementation("layer_norm_fwd", x)(inputs[0], shape, *inputs[1:], eps)
        # a norm whose normalised dimensions include the tokens needs all tokens
        x_record = record_of(x, codec) if x.dim() > len(shape) + 1 else whole_record_of(x, codec)
        affine = tuple(parameter(t) for t in (weight, bias) if t is not None)
        save(ctx, x_record, stored_exact(mean), stored_exact(rstd), *affine)
        rebuild = partial(_rebuild, shape=shape, eps=eps, wide=wide, has_weight=weight is not None)
        if copy:
            affine = tuple(stored_exact(t.detach().clone()) for t in (weight, bias) if t is not None)
        declare(y, rebuild, x_record, *affine)
        ctx.shape, ctx.wide = shape, wide
        ctx.has_weight, ctx.has_bias = weight is not None, bias is not None
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, *affine = load(ctx, dy)
        weight = affine[0] if ctx.has_weight else None
        bias = affine[-1] if ctx.has_bias else None
        # in backward autocast is off, and the kernel takes tensors of one dtype only
        x_in, gain, shift = in_fp32(x, weight, bias) if ctx.wide else (x, weight, bias)
        grads = implementation("layer_norm_bwd", dy)(
            dy, x_in, ctx.shape, mean, rstd, gain, shift, ctx.needs_input_grad[:3]
        )
        stock = (x, weight, bias)
        dx, dweight, dbias = (
            g.to(t.dtype) if g is not None and t is not None else None for g, t in zip(grads, stock, strict=True)
        )
        return dx, dweight, dbias, None, None, None, None


def layer_norm(
    x: Tensor,
    shape: _Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    codec: Codec = IDENTITY,
    copy_affine: bool = False,
) -> Tensor:
    """LayerNorm over the last ``len(shape)`` dimensions.

    Args:
        x: ``[..., *shape]``, floating point.
        shape: The normalised dimensions.
        weight, bias: ``shape`` or None.
        eps: Added to the variance.
        codec: How x is stored if it has to be.
        copy_affine: Rebuild the output from copies of weight and bias. For sharded modules: when a consumer in another
            FSDP unit rebuilds the output, the memory of these parameters has already been freed.

    Returns:
        Like x; fp32 under autocast on an accelerator, as in stock.

    Saves:
        x by its record, mean and rstd (fp32, one each per row); the affine parameters by reference. Not the output:
        consumers rebuild it.

    Gradient:
        Exact (identity codec): bit-equal to stock by the reference, within stock's own error by a kernel.
    """
    return applied(LayerNormFunction, x, weight, bias, shape, eps, codec, copy_affine)
