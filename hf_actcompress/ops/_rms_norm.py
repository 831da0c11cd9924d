"""RMSNorm that keeps its input and rstd; the output is derived from them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..codecs import IDENTITY, Codec
from ..dispatch import implementation
from ..records import applied, declare, load, parameter, record_of, save, stored_exact
from .first_order import once_differentiable


def _rebuild(x: Tensor, rstd: Tensor, weight: Tensor | None = None, *, formula: str) -> Tensor:
    y: Tensor = implementation("rms_norm_rebuild", x, formula)(x, rstd, weight, formula)
    return y


class RMSNormFunction(torch.autograd.Function):
    """Variant "input": keeps x and rstd; rebuilds y."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float | None, formula: str, codec: Codec, copy: bool
    ) -> Tensor:
        y, rstd = implementation("rms_norm_fwd", x, formula)(x, weight, eps, formula)
        kept = [record_of(x, codec), stored_exact(rstd)]
        if weight is not None:
            kept.append(parameter(weight))
        save(ctx, *kept)
        if copy and weight is not None:
            kept[-1] = stored_exact(weight.detach().clone())
        declare(y, partial(_rebuild, formula=formula), *kept)
        ctx.formula = formula
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd, *rest = load(ctx, dy)
        weight = rest[0] if rest else None
        bwd = implementation("rms_norm_bwd", dy, ctx.formula)
        dx, dweight = bwd(dy, x, weight, rstd, ctx.formula, ctx.needs_input_grad[:2])
        return dx, dweight, None, None, None, None


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float | None,
    formula: str = "weight_after_cast",
    *,
    codec: Codec = IDENTITY,
    copy_affine: bool = False,
) -> Tensor:
    """RMSNorm over the last dimension.

    Args:
        x: ``[..., C]``, floating point.
        weight: ``[C]`` or None.
        eps: Added to the mean square; None for torch's default, the machine epsilon of fp32.
        formula: A row of ``reference.RMS_NORM_FORMULAS``: in which dtype the gain is applied.
        codec: How x is stored if it has to be.
        copy_affine: Rebuild the output from a copy of the weight. For sharded modules: when a consumer in another FSDP
            unit rebuilds the output, the memory of this parameter has already been freed.

    Returns:
        ``[..., C]``, equal to the stock module's.

    Saves:
        x by its record, rstd (fp32, one per row), the weight by reference. Stock keeps x in fp32 and the normalised
        x, and every consumer keeps the output.

    Gradient:
        Exact (identity codec): bit-equal to the stock modules' by the reference, within their own error by a kernel.
    """
    return applied(RMSNormFunction, x, weight, eps, formula, codec, copy_affine)
