"""f'(x) of pointwise activations as a tensor that is kept: computed in fp32, rounded once to x's dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.activation import activation_bwd


def activation_derivative(x: Tensor, kind: str, options: tuple[float, ...] = ()) -> Tensor:
    """f'(x), by the row `kind` of `ACTIVATIONS`."""
    wide = x if x.dtype == torch.float64 else x.float()
    return activation_bwd(torch.ones_like(wide), wide, kind, options).to(x.dtype)
