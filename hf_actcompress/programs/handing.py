"""Gradients of weights, handed on one by one: a program that returns all of its own at once holds all of them at once.

While a first backward makes gradients they stay anyway, so nothing is lost. In the next one of an accumulation, or
where a hook uses up each gradient as soon as it is there (an optimizer inside of the backward), stock's engine holds
one at a time. There a weight goes into the program through `Handed`: the program's backward leaves the two factors of
the product behind, and the weight's own backward, which the engine runs right after it, multiplies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..private_apis import accumulation_hooks
from ..records import Derived, declare_as, known_record

# elements of gradients that a program may hold at once in any case: 4 MiB of fp32
SLACK = 2**20
Box = list[Tensor]
# the gradient of each output that is left behind, by the output's place
Heads = dict[int, Tensor]


class Handed(torch.autograd.Function):
    """A weight as it is; its gradient is the product of the two tensors in a box, in the weight's dtype."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, box: Box) -> Tensor:
        ctx.box = box
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, placeholder: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if not ctx.box:
            # there are several products, whose sum has come
            return placeholder, None
        left, right = ctx.box
        ctx.box.clear()
        return left.mm(right).to(placeholder.dtype), None


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


def in_box(box: Box, weight_shape: Sequence[int], dtype: torch.dtype, left: Tensor, right: Tensor) -> Tensor:
    """Leave the factors of a gradient behind; what goes through the engine in its place, without memory of its own."""
    box[:] = left, right
    return left.new_zeros((), dtype=dtype).expand(*weight_shape)


def to_hand_on(weights: Sequence[Tensor | None], rows: int, width: int) -> tuple[int, ...] | None:
    """Which weights of a program want their gradients handed on, by place; None: a program would hold too much.

    A program may hold at once what four activations of the layer's width take, or `SLACK`: a layer keeps 20 and more.

    Args:
        weights: In order.
        rows: Tokens of the call. With many of them the factors are as large as the product.
        width: Of the layer's input.
    """
    waiting = [
        i
        for i, w in enumerate(weights)
        if w is not None and w.requires_grad and (w.grad is not None or accumulation_hooks(w))
    ]
    if not waiting:
        return ()
    sizes = {i: w.numel() for i in waiting if (w := weights[i]) is not None}
    allowed = max(SLACK, 4 * rows * width)
    if sum(sizes.values()) <= allowed:
        return ()
    handed = tuple(
        i for i in waiting if (w := weights[i]) is not None and w.dim() == 2 and 4 * rows * sum(w.shape) < w.numel()
    )
    return handed if sum(size for i, size in sizes.items() if i not in handed) <= allowed else None
