"""Values in another shape or order, as operations."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from .backward import Backward
from .emit import Emitter
from .step import Operation, Step
from .views import reshaped, size_of


@dataclass(frozen=True)
class Permute(Operation):
    """A view with the dimensions in another order."""

    order: tuple[int, ...]
    same: ClassVar[bool] = True

    def forward(self, e: Emitter, x: Node) -> Node:
        return _permuted(e, x, self.order)

    def backward(self, b: Backward, step: Step) -> None:
        back = tuple(self.order.index(i) for i in range(len(self.order)))
        b.give(step.x, _permuted(b, b.dy(step), back))


def _permuted(e: Emitter, x: Node, order: tuple[int, ...]) -> Node:
    moved = [i for i, dim in enumerate(order) if i != dim]
    if len(moved) == 2:
        return e.call(torch.transpose, x, *moved)
    return e.call(torch.permute, x, order)


@dataclass(frozen=True)
class Contiguous(Operation):
    def forward(self, e: Emitter, x: Node) -> Node:
        return e.call(torch.Tensor.contiguous, x)

    by_rows: ClassVar[bool] = True

    def backward(self, b: Backward, step: Step) -> None:
        b.give(step.x, b.dy(step))


@dataclass(frozen=True)
class Reshape(Operation):
    """x in another shape, `sizes`; the shape of x itself is `back`. `reshaped` says what these hold."""

    sizes: tuple[int, ...]
    back: tuple[int, ...]
    same: ClassVar[bool] = True

    @property
    def flattens(self) -> bool:
        """Whether it makes [B, T, H * D] of heads [B, T, H, D]."""
        return len(self.sizes) == 3 and len(self.back) == 4 and self.sizes[:2] == (-2, -3)

    @property
    def makes_tokens(self) -> bool:
        """Whether it makes [B, T, C] of rows [B * T, C]."""
        return len(self.sizes) == 3 and len(self.back) == 2

    @property
    def makes_rows(self) -> bool:
        """Whether it makes rows [B * T, C] of [B, T, C]."""
        return len(self.sizes) == 2 and len(self.back) == 3

    def structure(self) -> Hashable:
        return tuple(tuple(min(size, 0) for size in sizes) for sizes in (self.sizes, self.back))

    def forward(self, e: Emitter, x: Node) -> Node:
        return reshaped(e, x, self.sizes)

    def backward(self, b: Backward, step: Step) -> None:
        b.give(step.x, reshaped(b, b.dy(step), self.back))


@dataclass(frozen=True)
class Tokens(Operation):
    """Rows [B * T, ...] as [B, T, ...], where B and T are read off another value."""

    sizes: tuple[int, ...]
    again: ClassVar[bool] = False

    def structure(self) -> Hashable:
        return len(self.sizes)

    def forward(self, e: Emitter, x: Node, like: Node) -> Node:
        return e.call(torch.Tensor.view, x, *(size_of(e, like, dim) for dim in (0, 1)), *self.sizes)

    def backward(self, b: Backward, step: Step) -> None:
        b.give(step.x, reshaped(b, b.dy(step), (-1, *self.sizes)))
