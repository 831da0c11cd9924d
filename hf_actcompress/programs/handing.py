"""Gradients of a program's outputs, left behind for it, so that it lets go of each as soon as it has read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..records import Derived, declare_as, known_record

# from so many elements on gradients of outputs are left behind: 4 MiB of fp32
LARGE = 2**20
# the gradient of each output that is left behind, by the output's place
Heads = dict[int, Tensor]


class HeadsHanded(torch.autograd.Function):
    """Queries, keys and values as they are. Their gradients are left behind, so that a program lets go of each.

    Autograd's engine holds what it hands to a Function until that is done: 3 times the width of a layer.
    """

    @staticmethod
    def forward(ctx: Any, heads: Heads, places: Sequence[int], *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.heads, ctx.places = heads, places
        # no views: on what a layer returns somebody may write
        return tuple(y.detach() for y in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        ctx.heads.update(zip(ctx.places, grads, strict=True))
        return (None, None, *(g.new_zeros(()).expand(g.shape) for g in grads))


def let_go(heads: Heads, place: int, y: Tensor) -> Tensor:
    """An output as it is, whose gradient is left behind. What its readers make it again from stays known."""
    record = known_record(y)
    (alias,) = HeadsHanded.apply(heads, (place,), y)  # type: ignore[no-untyped-call]
    if isinstance(record, Derived):
        declare_as(alias, record)
    return alias  # type: ignore[no-any-return]


def with_heads(grads: Sequence[Any], heads: Heads | None, graded: Sequence[int]) -> list[Tensor]:
    """The gradients of the outputs that want one, the first one last; those that have been left behind from there."""
    left = {} if heads is None else heads
    return [left.pop(i) if i in left else grads[i] for i in reversed(graded)]
