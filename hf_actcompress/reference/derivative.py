"""f'(x) of pointwise activations as a tensor to keep: computed in fp32, rounded once to x's dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .activation import activation_bwd


def activation_derivative(x: Tensor, kind: str, options: tuple[float, ...] = ()) -> Tensor:
    """f'(x) by the row `kind` of `ACTIVATIONS`."""
    wide = x if x.dtype == torch.float64 else x.float()
    return activation_bwd(torch.ones_like(wide), wide, kind, options).to(x.dtype)


def forward_derivative(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """f'(x) of any pointwise function, by dual numbers."""
    wide = x.detach() if x.dtype == torch.float64 else x.detach().float()
    with torch.autocast(x.device.type, enabled=False), forward_ad.dual_level():
        dual = forward_ad.make_dual(wide, torch.ones_like(wide))  # type: ignore[no-untyped-call]
        slope: Tensor | None = forward_ad.unpack_dual(function(dual)).tangent  # type: ignore[no-untyped-call]
        # a constant function has no tangent
        return torch.zeros_like(x) if slope is None else slope.to(x.dtype)
