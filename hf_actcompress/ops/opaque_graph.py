"""The small graph of an opaque function: what it keeps, on the way from a layer's forward to its backward.

When a layer's graph runs, the function is called under autograd between `Enter` and `End`. The end crosses to the
layer's backward (`Ran`), which runs the backward of the small graph (`run_backward`).

Attention keeps its queries, keys and values. Where the layer's backward has some of them in any case, for example from
the inputs of their norms, the small graph keeps only which ones they are, and the backward gives it the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..private_apis import above_autograd, innermost_saved_tensor_hooks


class Box:
    """What goes into the small graph, and comes out of it, in one backward: tensors that it was given in the forward,
    the gradient of its output, and their gradients."""

    __slots__ = ("dout", "given", "grads", "likes")

    def __init__(self, likes: Sequence[tuple[torch.Size, torch.dtype]]) -> None:
        self.likes = likes
        self.given: Sequence[Tensor] = ()
        self.dout: Tensor | None = None
        self.grads: Sequence[Tensor | None] = ()


class _Place(NamedTuple):
    """Where a kept tensor is among those that are given again: the same elements, seen in another way perhaps.

    Attributes:
        number: Which of these tensors it is.
        layout: That tensor's shape and strides.
        size, stride: Those of the kept one.
    """

    number: int
    layout: tuple[torch.Size, tuple[int, ...]]
    size: torch.Size
    stride: tuple[int, ...]

    def of(self, given: Sequence[Tensor]) -> Tensor:
        x, (shape, strides) = given[self.number], self.layout
        if x.stride() != strides:
            x = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device).copy_(x)
        return x.as_strided(self.size, self.stride)


def keeping_places(box: Box, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """While the block runs, autograd keeps the places of these tensors, and of other views of the same elements.

    What else it keeps goes through the hooks that are on.
    """
    # an output that was kept with its own history would never be freed
    pack_other, unpack_other = innermost_saved_tensor_hooks() or (Tensor.detach, _same)
    # no reference to a tensor: autograd holds this function as long as what it has packed
    places = {
        _elements(x): (number, (x.shape, x.stride()))
        for number, x in enumerate(tensors)
        if all(stride or size == 1 for size, stride in zip(x.shape, x.stride(), strict=True))
    }

    def pack(x: Tensor) -> Any:
        place = places.get(_elements(x))
        return pack_other(x) if place is None else _Place(*place, x.shape, x.stride())

    def unpack(kept: Any) -> Tensor:
        return kept.of(box.given) if isinstance(kept, _Place) else unpack_other(kept)

    return saved_tensors_hooks(pack, unpack)  # type: ignore[no-untyped-call, no-any-return]


def _elements(x: Tensor) -> tuple[Any, ...]:
    """Says which elements of which memory a tensor shows, in whatever order."""
    found: list[tuple[int, int]] = []
    for stride, size in sorted((n, size) for n, size in zip(x.stride(), x.shape, strict=True) if size != 1):
        if found and stride == found[-1][0] * found[-1][1]:
            found[-1] = (found[-1][0], found[-1][1] * size)
        else:
            found.append((stride, size))
    return x.untyped_storage()._cdata, x.dtype, x.storage_offset(), tuple(found)


def _same(x: Tensor) -> Tensor:
    return x


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


def run_backward(ran: Ran, dout: Tensor, given: Sequence[Tensor], _: int) -> list[Tensor]:
    """In a graph that runs: the gradients of the tensors that want one. `given` are these tensors again, or none."""
    box = ran.box
    if not ran.end.requires_grad:
        return [dout.new_empty(shape, dtype=dtype) for shape, dtype in box.likes]
    box.dout, box.given = dout, given
    with above_autograd():
        # the layer's backward may run again; what is not needed any more is freed with the last reference
        torch.autograd.backward(ran.end, ran.end.new_empty(0), retain_graph=True)
    grads, box.grads, box.dout, box.given = box.grads, (), None, ()
    likes = zip(grads, box.likes, strict=True)
    return [dout.new_zeros(shape, dtype=dtype) if x is None else x for x, (shape, dtype) in likes]
