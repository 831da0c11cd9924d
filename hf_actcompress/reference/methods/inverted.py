"""The derivative of a GELU-like activation from its output and one bit: on which side of the minimum the input was."""

from __future__ import annotations

import torch
from torch import Tensor

from ..bits import pack_mask, unpack_mask
from .tables import SAME_FUNCTION, InvertedFit
from .tables.inverted import INVERTED as _FITTED

INVERTED: dict[str, InvertedFit] = _FITTED | {name: _FITTED[same] for name, same in SAME_FUNCTION.items()}


def activation_output_bits(x: Tensor, kind: str) -> Tensor:
    """Which elements of x lie left of the minimum of f: uint8, 8 elements per byte. `kind` is a row of `INVERTED`.

    inf is marked as if it did, which no output of inf does: f' of inf is NaN, that of an f(x) that overflowed is 1. So
    is NaN.
    """
    # the limit is rounded to x's dtype; f' is 0 there to within half a step of x
    return pack_mask(((x >= INVERTED[kind].x_min) & (x < torch.inf)).logical_not_())


def activation_output_bwd(dy: Tensor, y: Tensor, bits: Tensor, kind: str) -> Tensor:
    """dx = dy * f'(x) in y's dtype, rounded once, from y = f(x) as the forward rounded it and the bits of x."""
    factor = inverted_derivative(y, unpack_mask(bits, y.shape), kind)
    return (dy.to(factor.dtype) * factor).to(y.dtype)


def inverted_derivative(y: Tensor, left: Tensor, kind: str) -> Tensor:
    """f'(f^-1(y)) on the branch that `left` says, fp32 (fp64 for fp64). y may be rounded to below the minimum."""
    fit = INVERTED[kind]
    y = y if y.dtype == torch.float64 else y.float()
    # right: s = sqrt(y - y*), f' = s P(s)
    s = (y - fit.y_min).clamp_(min=0).sqrt_()
    # left: w = sqrt(-log(y / y*)), f' = y w Q(w); no further than the fit reaches, where y is 1e-9
    reach = fit.centres[0] + fit.halves[0]
    w = (y / fit.y_min).clamp_(min=0, max=1).log_().neg_().sqrt_().clamp_(max=reach)
    outer = s > fit.split
    z = torch.where(left, _mapped(w, fit, 0), torch.where(outer, _mapped(s, fit, 2), _mapped(s, fit, 1)))
    polynomial = torch.zeros_like(z)
    for in_left, in_inner, in_outer in zip(*(reversed(c) for c in fit.coefficients), strict=True):
        right = torch.where(outer, in_outer, in_inner)
        polynomial = polynomial.mul_(z).add_(torch.where(left, in_left, right))
    factor = torch.where(left, y * w, s).mul_(polynomial)
    factor = torch.where((s >= fit.end) & ~left, 1.0, factor)
    # an inf on the left is what inf itself is marked as; f' of it is inf * 0 in stock
    return torch.where(left & (y == torch.inf), torch.nan, factor)


def _mapped(coordinate: Tensor, fit: InvertedFit, piece: int) -> Tensor:
    return (coordinate - fit.centres[piece]) / fit.halves[piece]
