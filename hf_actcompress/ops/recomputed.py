"""A cheap function without weights: keeps its input, and runs again in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..codecs import IDENTITY, Codec
from ..records import applied, declare, load, record_of, save
from .autocast import SameAutocast
from .first_order import once_differentiable

_Stock = Callable[[Tensor], Tensor]


class RecomputedFunction(torch.autograd.Function):
    """Variant "input": keeps x, and nothing of what the function keeps itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stock: _Stock, codec: Codec) -> Tensor:
        y = stock(x)
        record = record_of(x, codec)
        save(ctx, record)
        ctx.stock = SameAutocast(stock, x)
        declare(y, ctx.stock, record)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (x,) = load(ctx, dy)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (dx,) = torch.autograd.grad(ctx.stock(x), x, dy)
        return dx, None, None


def recomputed(x: Tensor, stock: _Stock, *, codec: Codec = IDENTITY) -> Tensor:
    """``stock(x)`` for a function of x alone: no weights, no random numbers, cheap to run again.

    Args:
        x: Any shape, floating point.
        stock: Stock's code. Its result is no view of x.
        codec: How x is stored.

    Returns:
        What stock returns.

    Saves:
        x (stock: what each op inside of the function keeps, and its result in the next layer).

    Gradient:
        Exact, bit-equal to stock with ``codec="identity"``: stock's own ops run again. Of the first order.
    """
    y: Tensor = applied(RecomputedFunction, x, stock, codec)
    return y
