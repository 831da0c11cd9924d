"""LayerNorm over the last dimensions, with torch's own kernels."""

from __future__ import annotations

import torch
from torch import Tensor

_Shape = tuple[int, ...]


def layer_norm_fwd(
    x: Tensor, shape: _Shape, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """y like x, and mean and rstd, one value per row."""
    return torch.native_layer_norm(x, shape, weight, bias, eps)


def layer_norm_bwd(
    dy: Tensor,
    x: Tensor,
    shape: _Shape,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    needed: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx, dweight, dbias; those not `needed` are None."""
    grads = torch.ops.aten.native_layer_norm_backward(dy, x, shape, mean, rstd, weight, bias, list(needed))
    dx, dweight, dbias = (grad if need else None for grad, need in zip(grads, needed, strict=True))
    return dx, dweight, dbias
