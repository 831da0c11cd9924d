"""LayerNorm over the last dimensions, with torch's own kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_Shape = tuple[int, ...]
# the overload is stored, because looking it up costs as much host time as the rest of the call
_backward: Any = torch.ops.aten.native_layer_norm_backward.default


def layer_norm_fwd(
    x: Tensor, shape: _Shape, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """y like x, and mean and rstd with one value per row."""
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
    dresidual: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx, dweight, dbias; None for those not `needed`.

    `dresidual` is x's other gradient, which comes by a residual path; dx is then the sum of both.
    """
    grads = _backward(dy, x, shape, mean, rstd, weight, bias, list(needed))
    if all(needed) and dresidual is None:
        return grads  # type: ignore[no-any-return]
    dx, dweight, dbias = (grad if need else None for grad, need in zip(grads, needed, strict=True))
    return dx if dx is None or dresidual is None else dresidual + dx, dweight, dbias
