"""The derivative of a GELU-like activation from its output and one bit: on which side of the minimum the input is."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.activation import SAME_FUNCTION
from ...reference.bits import pack_mask, unpack_mask
from .tables import INVERTED as _FITTED
from .tables_fit import InvertedFit

INVERTED: dict[str, InvertedFit] = _FITTED | {name: _FITTED[same] for name, same in SAME_FUNCTION.items()}


def activation_output_bits(x: Tensor, kind: str) -> Tensor:
    """Which elements of x are left of the minimum of f: uint8, 8 elements per byte. `kind` is a row of `INVERTED`.

    inf is marked as left, which no finite x with the output inf is: f' of inf is NaN, but f' of a finite x whose f(x)
    overflowed is 1. NaN is marked as left, too.
    """
    # the limit is rounded to x's dtype; within half a step of x around it f' is close to 0
    return pack_mask(((x >= INVERTED[kind].x_min) & (x < torch.inf)).logical_not_())


def activation_output_bwd(dy: Tensor, y: Tensor, bits: Tensor, kind: str) -> Tensor:
    """dx = dy * f'(x) in y's dtype, rounded once, from y = f(x) as the forward rounded it and the bits of x."""
    factor = inverted_derivative(y, unpack_mask(bits, y.shape), kind)
    return (dy.to(factor.dtype) * factor).to(y.dtype)


def inverted_derivative(y: Tensor, left: Tensor, kind: str) -> Tensor:
    """f'(f^-1(y)) on the branch given by `left`, fp32 (fp64 for fp64). A rounded y may be below the minimum."""
    fit = INVERTED[kind]
    y = y if y.dtype == torch.float64 else y.float()
    # right: s = sqrt(y - y*), f' = s P(s)
    s = (y - fit.y_min).clamp_(min=0).sqrt_()
    # left: w = sqrt(-log(y / y*)), f' = y w Q(w); w is limited to the fit's range, at whose end y is 1e-9
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
    # an inf on the left was inf itself, whose f' is inf * 0 in stock
    return torch.where(left & (y == torch.inf), torch.nan, factor)


def _mapped(coordinate: Tensor, fit: InvertedFit, piece: int) -> Tensor:
    return (coordinate - fit.centres[piece]) / fit.halves[piece]
