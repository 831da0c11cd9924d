"""Sums, products, casts and parts of values: the code between the modules of a layer."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from .backward import Backward
from .emit import Emitter
from .refusal import NotStraight
from .step import Operation, Step


@dataclass(frozen=True)
class Add(Operation):
    """y = a + b, of one shape."""

    by_rows: ClassVar[bool] = True
    again: ClassVar[bool] = False
    sums: ClassVar[bool] = True

    def forward(self, e: Emitter, a: Node, b: Node) -> Node:
        return e.call(operator.add, a, b)

    def backward(self, b: Backward, step: Step) -> None:
        for value in step.ins:
            b.give(value, b.dy(step))


@dataclass(frozen=True)
class Mul(Operation):
    """y = a * b; b may be broadcast to a's shape if it wants no gradient."""

    by_rows: ClassVar[bool] = True

    def forward(self, e: Emitter, a: Node, b: Node) -> Node:
        return e.call(operator.mul, a, b)

    def backward(self, b: Backward, step: Step) -> None:
        left, right = step.ins
        assert left is not None and right is not None
        if b.wants(right) and b.shape_of(left) != b.shape_of(right):
            raise NotStraight("it multiplies by a tensor of another shape that wants a gradient")
        for value, other in ((right, left), (left, right)):
            if b.wants(value):
                b.give(value, b.call(operator.mul, b.dy(step), b.want(other)))


@dataclass(frozen=True)
class Scale(Operation):
    """y = x * factor."""

    factor: float
    by_rows: ClassVar[bool] = True

    def forward(self, e: Emitter, x: Node) -> Node:
        return e.call(operator.mul, x, self.factor)

    def backward(self, b: Backward, step: Step) -> None:
        b.give(step.x, b.call(operator.mul, b.dy(step), self.factor))


@dataclass(frozen=True)
class Neg(Operation):
    def forward(self, e: Emitter, x: Node) -> Node:
        return e.call(operator.neg, x)

    by_rows: ClassVar[bool] = True

    def backward(self, b: Backward, step: Step) -> None:
        b.give(step.x, b.call(operator.neg, b.dy(step)))


@dataclass(frozen=True)
class Cast(Operation):
    """y = x in another dtype."""

    dtype: torch.dtype
    by_rows: ClassVar[bool] = True
    same: ClassVar[bool] = True

    def forward(self, e: Emitter, x: Node) -> Node:
        return e.cast(x, self.dtype)  # type: ignore[no-any-return]

    def backward(self, b: Backward, step: Step) -> None:
        # `give` casts it back
        b.give(step.x, b.dy(step))


@dataclass(frozen=True)
class Unbind(Operation):
    """The entries of x along a dimension, each without this dimension."""

    count: int
    dim: int
    same: ClassVar[bool] = True

    def rebuilds(self, index: int) -> bool:
        return True

    def forward(self, e: Emitter, x: Node) -> tuple[Node, ...]:
        parts = e.call(torch.unbind, x, self.dim)
        return tuple(e.item(parts, i) for i in range(self.count))

    def backward(self, b: Backward, step: Step) -> None:
        b.give(step.x, b.call(torch.stack, [b.dy(step, i) for i in range(self.count)], self.dim))


@dataclass(frozen=True)
class Split(Operation):
    """The parts of x along a dimension."""

    sizes: tuple[int, ...]
    dim: int
    same: ClassVar[bool] = True

    @property
    def works_by_rows(self) -> bool:
        return self.dim in (2, -1)

    def structure(self) -> Hashable:
        return len(self.sizes), self.dim

    def rebuilds(self, index: int) -> bool:
        return True

    def forward(self, e: Emitter, x: Node) -> tuple[Node, ...]:
        parts = e.call(torch.Tensor.split, x, list(self.sizes), self.dim)
        return tuple(e.item(parts, i) for i in range(len(self.sizes)))

    def backward(self, b: Backward, step: Step) -> None:
        b.give(step.x, b.call(torch.cat, [b.dy(step, i) for i in range(len(step.outs))], self.dim))


def unsliced(dy: Tensor, dim: int, size: int, start: int, step: int) -> Tensor:
    """dy [..., n] among zeros [..., size], if `dim` is the last dimension."""
    shape = list(dy.shape)
    shape[dim] = size
    dx = dy.new_zeros(shape)
    dx.transpose(dim, -1)[..., start : start + step * dy.size(dim) : step] = dy.transpose(dim, -1)
    return dx


@dataclass(frozen=True)
class Slice(Operation):
    """x[..., start:end:step] of x [..., size]; or a part of another dimension, counted from the last."""

    start: int
    end: int
    size: int
    step: int = 1
    dim: int = -1

    @property
    def works_by_rows(self) -> bool:
        return self.dim == -1

    def structure(self) -> Hashable:
        first = self.start if self.step > 1 else self.start == 0
        return first, self.end == self.size, self.step, self.dim

    def forward(self, e: Emitter, x: Node) -> Node:
        if self.step > 1:
            return e.call(operator.getitem, x, (Ellipsis, slice(self.start, self.end, self.step)))
        return e.call(torch.narrow, x, self.dim, self.start, self.end - self.start)

    def backward(self, b: Backward, step: Step) -> None:
        b.give(step.x, b.call(unsliced, b.dy(step), self.dim, self.size, self.start, self.step))


@dataclass(frozen=True)
class Stack(Operation):
    """Values stacked along a new last dimension."""

    def forward(self, e: Emitter, *xs: Node) -> Node:
        return e.call(torch.stack, list(xs), -1)

    def backward(self, b: Backward, step: Step) -> None:
        parts = b.call(torch.unbind, b.dy(step), -1)
        b.give_each(step.ins, parts)


@dataclass(frozen=True)
class Repeat(Operation):
    """x with each entry of the last dimension repeated several times in a row."""

    times: int

    def forward(self, e: Emitter, x: Node) -> Node:
        return e.call(torch.repeat_interleave, x, self.times, -1)

    def backward(self, b: Backward, step: Step) -> None:
        b.give(step.x, b.call(_summed, b.dy(step), self.times))


def _summed(dy: Tensor, times: int) -> Tensor:
    return dy.view(*dy.shape[:-1], -1, times).sum(-1)


@dataclass(frozen=True)
class Cat(Operation):
    """Values joined along the last dimension."""

    sizes: tuple[int, ...]
    by_rows: ClassVar[bool] = True

    def structure(self) -> Hashable:
        return len(self.sizes)

    def forward(self, e: Emitter, *xs: Node) -> Node:
        return e.call(torch.cat, list(xs), -1)

    def backward(self, b: Backward, step: Step) -> None:
        parts = b.call(torch.Tensor.split, b.dy(step), list(self.sizes), -1)
        b.give_each(step.ins, parts)
