"""A cheap function of one tensor: keeps its input, and runs again in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..codecs import IDENTITY, Codec
from ..records import applied, declare, load, raw, record_of, save
from .autocast import SameAutocast
from .first_order import once_differentiable

_Stock = Callable[[Tensor], Tensor]


class RecomputedFunction(torch.autograd.Function):
    """Variant "input": keeps x, and nothing of what the function keeps itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stock: _Stock, codec: Codec, *weights: Tensor) -> Tensor:
        y = stock(x)
        # the function may have a ReLU in it: experts, a PReLU, a model's own activation
        record = record_of(x, codec.keeping_sign())
        # the weights for torch's check that nobody has written on them
        save(ctx, record, *map(raw, weights))
        ctx.stock = SameAutocast(stock, x)
        declare(y, ctx.stock, record)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = load(ctx, dy)
        with torch.enable_grad():
            x = x.detach().requires_grad_(ctx.needs_input_grad[0])
            wanted = [t for t, needed in zip((x, *weights), _of_tensors(ctx), strict=True) if needed]
            found = iter(torch.autograd.grad(ctx.stock(x), wanted, dy, allow_unused=True))
        dx, *dweights = (next(found) if needed else None for needed in _of_tensors(ctx))
        return dx, None, None, *dweights


def _of_tensors(ctx: Any) -> tuple[bool, ...]:
    return (ctx.needs_input_grad[0], *ctx.needs_input_grad[3:])


def recomputed(x: Tensor, stock: _Stock, *weights: Tensor, codec: Codec = IDENTITY) -> Tensor:
    """``stock(x)`` for a cheap function of x that draws no random numbers.

    Args:
        x: Any shape, floating point.
        stock: Stock's code. Its result is no view of x.
        weights: The leaves that the function reads beside x.
        codec: How x is stored.

    Returns:
        What stock returns.

    Saves:
        x, and the weights by reference (stock: what each op inside of the function keeps, and its result in the next
        layer).

    Gradient:
        Exact, bit-equal to stock with ``codec="identity"``: stock's own ops run again. Of the first order.
    """
    y: Tensor = applied(RecomputedFunction, x, stock, codec, *weights)
    return y
