"""A cheap function of one tensor: keeps its input, and runs again in backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..codecs import IDENTITY, Codec
from ..private_apis import not_a_view
from ..records import applied, declare, load, record_of, save, stored_exact
from .autocast import SameAutocast
from .first_order import once_differentiable
from .snapshot import Snapshot, alias, of_function

_Stock = Callable[[Tensor], Tensor]


class RecomputedFunction(torch.autograd.Function):
    """Variant "input": keeps x, and none of the tensors that the ops inside the function would save."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stock: _Stock, codec: Codec, own: Snapshot, *weights: Tensor) -> Tensor:
        y = not_a_view(stock(x))
        # the function may contain a ReLU, as experts, a PReLU or a model's own activation do
        record = record_of(x, codec.keeping_sign())
        # the weights are saved, too, for torch's check that they were not modified in place
        save(ctx, record, *map(stored_exact, weights))
        ctx.again = SameAutocast(own.run, x)
        declare(y, partial(ctx.again, None), record)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = load(ctx, dy)
        needed = (ctx.needs_input_grad[0], *ctx.needs_input_grad[4:])
        aliases = [alias(t, wanted) for t, wanted in zip((x, *weights), needed, strict=True)]
        with torch.enable_grad():
            y = ctx.again(aliases[1:], aliases[0])
        wanted = [t for t in aliases if t.requires_grad]
        found = iter(torch.autograd.grad(y, wanted, dy, allow_unused=True))
        dx, *dweights = (next(found) if wanted else None for wanted in needed)
        return dx, None, None, None, *dweights


def recomputed(x: Tensor, stock: _Stock, own: Snapshot | None = None, *, codec: Codec = IDENTITY) -> Tensor:
    """``stock(x)`` for a cheap function of x that draws no random numbers.

    Args:
        x: Any shape, floating point.
        stock: Stock's code. Its result shares no memory with x.
        own: The module whose code that is, as it is now, and its weights. Its code runs in backward. None: no module is
            read.
        codec: How x is stored.

    Returns:
        What stock returns.

    Saves:
        x, and the weights by reference (stock: what each op inside the function keeps, and the function's result, which
        the next layer keeps).

    Gradient:
        Exact, bit-equal to stock with ``codec="identity"``: stock's own ops run again. First order only.
    """
    own = own or of_function(stock)
    return applied(RecomputedFunction, x, stock, codec, own, *own.tensors)
