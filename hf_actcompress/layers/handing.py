"""Hands a plan the gradients of its outputs past autograd's engine, so that it frees each one once it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..private_apis.batching import is_batched
from ..records import Derived, declare_as, known_record

# from this number of elements on, gradients of outputs are handed over in this way: 4 MiB of fp32
LARGE = 2**20
# the gradients that `HeadsHanded` leaves for a plan, by the place of the output
Heads = dict[int, Tensor]


def no_views(outputs: Sequence[Any]) -> tuple[Any, ...]:
    """A Function's outputs as autograd may see them: not as views, because somebody may write on them in place.

    An alias by `detach` has the version counter of what it is made from, so a write is still seen.
    """
    return tuple([y.detach() if y._is_view() else y for y in outputs])


class HeadsHanded(torch.autograd.Function):
    """Returns queries, keys and values as they are. Its backward leaves their gradients in `heads` for the plan.

    Autograd's engine would hold the gradients that it hands to a Function until this is done: 3 times a layer's width.
    """

    @staticmethod
    def forward(ctx: Any, heads: Heads, places: Sequence[int], *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.heads, ctx.places = heads, places
        ctx.set_materialize_grads(False)
        return tuple(y.detach() for y in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        if any(map(is_batched, grads)):
            # the plan's backward runs for one sample after the other
            return (None, None, *grads)
        ctx.heads.update((i, g) for i, g in zip(ctx.places, grads, strict=True) if g is not None)
        return (None, None, *(None if g is None else g.new_zeros(()).expand(g.shape) for g in grads))


def let_go(heads: Heads, place: int, y: Tensor) -> Tensor:
    """An output as it is, whose gradient is left in `heads`. It keeps its record if it is derived, for its readers."""
    record = known_record(y)
    (alias,) = HeadsHanded.apply(heads, (place,), y)  # type: ignore[no-untyped-call]
    if isinstance(record, Derived):
        declare_as(alias, record)
    return alias  # type: ignore[no-any-return]


def with_heads(grads: Sequence[Any], heads: Heads | None, graded: Sequence[int]) -> list[Tensor]:
    """The gradients of the outputs that want one, in reverse order. Those that are in `heads` are taken from there."""
    left = {} if heads is None else heads
    return [left.pop(i) if i in left else grads[i] for i in reversed(graded)]
