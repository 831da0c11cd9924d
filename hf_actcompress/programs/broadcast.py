"""Values that are broadcast, whose gradients are sums: the bias of a linear layer that adds it after the product, and
heads of keys and values that several heads of queries read.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Node

from .backward import Backward
from .emit import Emitter
from .step import Operation, Step
from .views import rows_of


@dataclass(frozen=True)
class Shift(Operation):
    """y = x + bias, or x - bias if `negative`, of x [..., O] and bias [O]."""

    negative: bool = False

    def forward(self, e: Emitter, x: Node, bias: Node) -> Node:
        return e.call(operator.sub if self.negative else operator.add, x, bias)

    def backward(self, b: Backward, step: Step) -> None:
        x, bias = step.ins
        if b.wants(bias):
            gradient = b.call(torch.Tensor.sum, rows_of(b, b.dy(step)), 0)
            b.give(bias, b.call(operator.neg, gradient) if self.negative else gradient)
        b.give(x, b.dy(step))


@dataclass(frozen=True)
class Expand(Operation):
    """x expanded along a dimension of size 1, without a copy. `dim` is counted from the last dimension."""

    dim: int
    count: int

    def forward(self, e: Emitter, x: Node) -> Node:
        sizes = [-1] * e.meta(x).dim()
        sizes[self.dim] = self.count
        return e.call(torch.Tensor.expand, x, sizes)

    def structure(self) -> tuple[type, int, bool]:
        return type(self), self.dim, self.count > 1

    def backward(self, b: Backward, step: Step) -> None:
        b.give(step.x, b.call(torch.Tensor.sum, b.dy(step), self.dim, True))
