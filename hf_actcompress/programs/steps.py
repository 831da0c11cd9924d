"""The steps of a program: each computes one value from others, and their gradients from its own.

A value is a number: its place in the list `v` of a run. `g` is the list of gradients, in the same places. Every step is
straight-line torch: what can be decided before a step runs has been decided when the program was made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import reference
from ..dispatch import implementation

Values = list[Any]
_LINEAR = torch.nn.functional.linear


def add_gradient(g: Values, at: int, x: Tensor) -> None:
    """Where paths meet, gradients add up in the order of autograd's engine: the path that was used last comes first."""
    known = g[at]
    g[at] = x if known is None else known + x


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        y: The value that it makes.
        rebuilt: Whether it is made again in backward instead of kept: pointwise functions of kept values are.
    """

    y: int
    rebuilt: ClassVar[bool] = False

    def inputs(self) -> tuple[int, ...]:
        """The values that it is made from: those whose gradients it gives."""
        raise NotImplementedError

    def needs(self, wanted: frozenset[int]) -> tuple[int, ...]:
        """The values that backward reads, if gradients of `wanted` are asked for."""
        raise NotImplementedError

    def forward(self, v: Values) -> None:
        raise NotImplementedError

    def rebuild(self, v: Values) -> None:
        """Make the value again, out of what is kept; the same bits."""
        self.forward(v)

    def backward(self, v: Values, g: Values, wanted: frozenset[int]) -> None:
        """Add to the gradients of those inputs that are wanted."""
        raise NotImplementedError


@dataclass(frozen=True)
class RMSNorm(Step):
    """y = RMSNorm(x): `variant` is a row of `reference.RMS_NORM_VARIANTS`. Keeps x and rstd, and y is made again."""

    x: int
    weight: int
    rstd: int
    eps: float
    variant: str
    rebuilt: ClassVar[bool] = True

    def inputs(self) -> tuple[int, ...]:
        return (self.x, self.weight)

    def needs(self, wanted: frozenset[int]) -> tuple[int, ...]:
        return (self.x, self.weight, self.rstd)

    def forward(self, v: Values) -> None:
        x = v[self.x]
        forward = implementation("rms_norm_fwd", x, self.variant)
        v[self.y], v[self.rstd] = forward(x, v[self.weight], self.eps, self.variant)

    def rebuild(self, v: Values) -> None:
        x = v[self.x]
        v[self.y] = implementation("rms_norm_rebuild", x, self.variant)(x, v[self.rstd], v[self.weight], self.variant)

    def backward(self, v: Values, g: Values, wanted: frozenset[int]) -> None:
        needed = self.x in wanted, self.weight in wanted
        dy = g[self.y]
        backward = implementation("rms_norm_bwd", dy, self.variant)
        dx, dweight = backward(dy, v[self.x], v[self.weight], v[self.rstd], self.variant, needed)
        if dx is not None:
            add_gradient(g, self.x, dx)
        if dweight is not None:
            add_gradient(g, self.weight, dweight)


@dataclass(frozen=True)
class Linear(Step):
    """y = x W^T + b, or x W + b if `transposed` (transformers' Conv1D); `bias` is None where there is none."""

    x: int
    weight: int
    bias: int | None = None
    transposed: bool = False

    def inputs(self) -> tuple[int, ...]:
        return (self.x, self.weight) if self.bias is None else (self.x, self.weight, self.bias)

    def needs(self, wanted: frozenset[int]) -> tuple[int, ...]:
        return ((self.weight,) if self.x in wanted else ()) + ((self.x,) if self.weight in wanted else ())

    def forward(self, v: Values) -> None:
        bias = None if self.bias is None else v[self.bias]
        if self.transposed:
            v[self.y] = reference.linear_fwd(v[self.x], v[self.weight], bias, True)
        else:
            v[self.y] = _LINEAR(v[self.x], v[self.weight], bias)

    def backward(self, v: Values, g: Values, wanted: frozenset[int]) -> None:
        x = v[self.x] if self.weight in wanted else None
        weight = v[self.weight] if self.x in wanted else None
        with_bias = self.bias is not None and self.bias in wanted
        dx, dweight, dbias = reference.linear_bwd(g[self.y], x, weight, self.transposed, with_bias)
        if dx is not None:
            add_gradient(g, self.x, dx)
        if dweight is not None:
            add_gradient(g, self.weight, dweight)
        if dbias is not None and self.bias is not None:
            add_gradient(g, self.bias, dbias)


@dataclass(frozen=True)
class OfOne(Step):
    """A step of one value whose gradient needs nothing of it; made again in backward."""

    x: int
    rebuilt: ClassVar[bool] = True

    def inputs(self) -> tuple[int, ...]:
        return (self.x,)

    def needs(self, wanted: frozenset[int]) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class Heads(OfOne):
    """y [B, S, H, D] of x [B, S, H * D], or [B, H, S, D] if `swap`; a view."""

    size: int
    swap: bool

    def forward(self, v: Values) -> None:
        x = v[self.x]
        y = x.view(*x.shape[:-1], -1, self.size)
        v[self.y] = y.transpose(1, 2) if self.swap else y

    def backward(self, v: Values, g: Values, wanted: frozenset[int]) -> None:
        dy = g[self.y]
        add_gradient(g, self.x, (dy.transpose(1, 2) if self.swap else dy).flatten(2))


@dataclass(frozen=True)
class Swap(OfOne):
    """y [B, H, S, D] of x [B, S, H, D]; a view."""

    def forward(self, v: Values) -> None:
        v[self.y] = v[self.x].transpose(1, 2)

    def backward(self, v: Values, g: Values, wanted: frozenset[int]) -> None:
        add_gradient(g, self.x, g[self.y].transpose(1, 2))


@dataclass(frozen=True)
class Rope(OfOne):
    """y = x turned by the angles cos and sin [B or 1, S, D]; x [B, H, S, D]."""

    cos: int
    sin: int

    def needs(self, wanted: frozenset[int]) -> tuple[int, ...]:
        return (self.cos, self.sin)

    def forward(self, v: Values) -> None:
        x = v[self.x]
        v[self.y] = implementation("rope_fwd", x)(x, v[self.cos].unsqueeze(1), v[self.sin].unsqueeze(1))

    def backward(self, v: Values, g: Values, wanted: frozenset[int]) -> None:
        dy = g[self.y]
        backward = implementation("rope_bwd", dy)
        add_gradient(g, self.x, backward(dy, v[self.cos].unsqueeze(1), v[self.sin].unsqueeze(1), dy.dtype))


@dataclass(frozen=True)
class GatedProduct(Step):
    """y = stock(gate) * up; `kind` and `options` name the derivative. Keeps gate and up, and y is made again."""

    gate: int
    up: int
    stock: Callable[[Tensor], Tensor]
    kind: str
    options: tuple[float, ...] = ()
    rebuilt: ClassVar[bool] = True

    def inputs(self) -> tuple[int, ...]:
        return (self.gate, self.up)

    def needs(self, wanted: frozenset[int]) -> tuple[int, ...]:
        return (self.gate, self.up)

    def forward(self, v: Values) -> None:
        v[self.y] = self.stock(v[self.gate]) * v[self.up]

    def backward(self, v: Values, g: Values, wanted: frozenset[int]) -> None:
        dh, gate, up = g[self.y], v[self.gate], v[self.up]
        backward = implementation("gated_product_bwd", dh, self.kind)
        dgate, dup = backward(dh, gate, up, self.stock, self.kind, self.options)
        add_gradient(g, self.up, dup)
        add_gradient(g, self.gate, dgate)


@dataclass(frozen=True)
class Add(Step):
    """y = a + b."""

    a: int
    b: int

    def inputs(self) -> tuple[int, ...]:
        return (self.a, self.b)

    def needs(self, wanted: frozenset[int]) -> tuple[int, ...]:
        return ()

    def forward(self, v: Values) -> None:
        v[self.y] = v[self.a] + v[self.b]

    def backward(self, v: Values, g: Values, wanted: frozenset[int]) -> None:
        dy = g[self.y]
        if self.a in wanted:
            add_gradient(g, self.a, dy)
        if self.b in wanted:
            add_gradient(g, self.b, dy)
