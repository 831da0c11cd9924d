"""The small graph of an opaque function: what it keeps, on the way from a layer's forward to its backward.

When a layer's graph runs, the function is called under autograd between `Enter` and `End`. The end crosses to the
layer's backward (`Ran`), which runs the backward of the small graph (`run_backward`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..private_apis import above_autograd


class Box:
    """Gradients on their way into the small graph, and out of it, in one backward."""

    __slots__ = ("dout", "grads", "likes")

    def __init__(self, likes: Sequence[tuple[torch.Size, torch.dtype]]) -> None:
        self.likes = likes
        self.dout: Tensor | None = None
        self.grads: Sequence[Tensor | None] = ()


class Ran(NamedTuple):
    """What crosses from forward to backward: the end of the small graph, a tensor without elements, and its box."""

    end: Tensor
    box: Box


class Enter(torch.autograd.Function):
    """The tensors that want a gradient, which backward leaves in the box. `start` wants one in their place."""

    @staticmethod
    def forward(ctx: Any, box: Box, start: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.box = box
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # type: ignore[override]
        ctx.box.grads = grads
        return (None,) * (2 + len(grads))


class End(torch.autograd.Function):
    """A tensor without elements, whose backward begins with the gradient in the box. So nothing is kept of `out`."""

    @staticmethod
    def forward(ctx: Any, box: Box, out: Tensor) -> Tensor:
        ctx.box = box
        return out.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:  # type: ignore[override]
        return None, ctx.box.dout


def run_backward(ran: Ran, dout: Tensor, _: int) -> list[Tensor]:
    """In a graph that runs: the gradients of the tensors that want one."""
    box = ran.box
    if not ran.end.requires_grad:
        return [dout.new_empty(shape, dtype=dtype) for shape, dtype in box.likes]
    box.dout = dout
    with above_autograd():
        # the layer's backward may run again; what is not needed any more is freed with the last reference
        torch.autograd.backward(ran.end, ran.end.new_empty(0), retain_graph=True)
    grads, box.grads, box.dout = box.grads, (), None
    likes = zip(grads, box.likes, strict=True)
    return [dout.new_zeros(shape, dtype=dtype) if x is None else x for x, (shape, dtype) in likes]
