"""Pointwise activations that keep their derivative, evaluated in the forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...codecs import IDENTITY, Codec
from ...dispatch import implementation
from ...ops.first_order import once_differentiable
from ...records import applied, keep, load, save


class ActivationDerivativeFunction(torch.autograd.Function):
    """Variant "derivative": keeps f'(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: Tensor, value: Callable[[Tensor], Tensor], codec: Codec) -> Tensor:
        save(ctx, keep(slope, codec))
        ctx.x_dtype = x.dtype
        return value(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (slope,) = load(ctx, dy)
        return (dy * slope).to(ctx.x_dtype), None, None, None


def activation_derivative(
    x: Tensor,
    stock: Callable[[Tensor], Tensor],
    kind: str,
    options: tuple[float, ...] = (),
    *,
    codec: Codec = IDENTITY,
) -> Tensor:
    """A pointwise activation that keeps one tensor, its derivative, however many stock keeps.

    Args:
        x: Any shape, floating point.
        stock: The stock forward, pointwise; its values are returned unchanged.
        kind: A row of ``reference.ACTIVATIONS``, whose derivative is f'.
        options: Constants of that row.
        codec: How f'(x) is stored.

    Returns:
        ``stock(x)``.

    Saves:
        f'(x) in x's dtype: ``x.element_size()`` bytes per element (``gelu_new`` in stock: four times that).

    Gradient:
        Exact but for the rounding of f' to x's dtype: relative error at most 2**-9 per element in bf16, none in fp32.

    Source:
        Nested forward automatic differentiation (arXiv 2209.10778).
    """
    with torch.no_grad():
        value = partial(implementation("activation_fwd", x, kind), stock=stock, kind=kind, options=options)
        slope = implementation("activation_derivative", x, kind)(x, kind, options)
    return applied(ActivationDerivativeFunction, x, slope, value, codec)
