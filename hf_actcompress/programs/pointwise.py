"""Activations, products with them, dropout and rotary embeddings as operations: they keep only their inputs."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.fx import Node

from ..codecs import Codec
from ..dispatch import runs_kernel
from ..models.probe import same_bits
from ..ops._activation import SIGN_DECIDES
from ..reference import dropout_fwd
from ..reference.activation import gelu_new_bwd, gelu_new_parts
from ..reference.gated_mlp import gated_product_bwd_of
from .backward import Backward
from .emit import ESTIMATES, Bound, Emitter, UnderAutocast
from .step import Operation, Step
from .tape import plain


@dataclass(frozen=True)
class Activation(Operation):
    """y = act(x); `kind` and `options` name the derivative, a row of `reference.ACTIVATIONS`."""

    act: nn.Module
    kind: str
    options: tuple[float, ...]
    keeps: ClassVar[int] = 1
    by_rows: ClassVar[bool] = True

    def codec_of(self, step: Step, value: int) -> Codec:
        return step.codec.keeping_sign() if self.kind in SIGN_DECIDES and value == step.x else step.codec

    def key(self) -> Hashable:
        return type(self), plain(self.act), self.kind, self.options

    @property
    def stock(self) -> Any:
        act: Any = self.act
        return act.stock_forward()

    def again_under(self, b: Emitter) -> Any:
        """The stock activation under the autocast of the forward, because a backward runs without autocast."""
        return UnderAutocast(self.stock, b.setting) if b.setting.autocast else Bound(self.stock)

    def has_kernel(self, e: Emitter, name: str, x: Node) -> bool:
        """Whether the function `name` is a kernel for the node."""
        if e.setting.choice in ESTIMATES:
            return False
        return runs_kernel(name, torch.empty(1, dtype=e.dtype(x), device=e.setting.device), self.kind)

    def forward(self, e: Emitter, *ins: Node) -> Node:
        return self._of(e, Bound(self.stock), *ins)

    def repeat(self, e: Emitter, *ins: Node) -> Node:
        return self._of(e, self.again_under(e), *ins)

    def _of(self, e: Emitter, stock: Any, x: Node) -> Node:
        if self.has_kernel(e, "activation_fwd", x):
            return e.dispatched("activation_fwd", self.kind, x, tail=(stock, self.kind, self.options))
        return e.call(stock, x)

    def rebuild(self, b: Backward, step: Step) -> None:
        x = step.x
        if self._is_gelu_new(b, x):
            parts = b.call(gelu_new_parts, b.want(x))
            b.shared[step.y] = b.item(parts, 0), b.item(parts, 1)
            b.values[step.y] = b.call(operator.mul, b.want(x), b.item(parts, 1))
            return
        tail = (self.again_under(b), self.kind, self.options, b.dtype_of(step.y))
        b.values[step.y] = b.dispatched("activation_value", self.kind, b.want(x), tail=tail)

    def backward(self, b: Backward, step: Step) -> None:
        x = step.x
        if step.y in b.shared:
            b.give(x, b.call(gelu_new_bwd, b.dy(step), b.want(x), *b.shared[step.y]))
            return
        b.give(x, b.dispatched("activation_bwd", self.kind, b.dy(step), b.want(x), self.kind, self.options))

    def _is_gelu_new(self, b: Backward, x: int) -> bool:
        """Whether stock computes it as `gelu_new_parts` does, so that the derivative can read the same tanh."""
        dtype, device = b.dtype_of(x), b.setting.device
        if self.kind != "gelu_new" or b.setting.autocast is not None or dtype.itemsize < 4:
            return False
        if b.setting.stops:
            # the shared tanh would be held in memory together with the first weight's gradient
            return False
        if not b.is_reference(b.want(x), self.kind, "activation_value", "activation_bwd"):
            return False
        tried = torch.linspace(-8.0, 8.0, 1001, dtype=dtype, device=device)
        return same_bits(self.stock(tried), tried * gelu_new_parts(tried)[1])


@dataclass(frozen=True)
class GatedProduct(Activation):
    """y = act(gate) * up."""

    keeps: ClassVar[int] = 2

    def _of(self, e: Emitter, stock: Any, gate: Node, up: Node) -> Node:  # type: ignore[override]
        if self.has_kernel(e, "gated_product_fwd", gate):
            return e.dispatched("gated_product_fwd", self.kind, gate, up, tail=(stock, self.kind, self.options))
        return e.call(operator.mul, e.call(stock, gate), up)

    def rebuild(self, b: Backward, step: Step) -> None:
        tail = (self.again_under(b), self.kind, self.options, b.dtype_of(step.y))
        gate, up = (b.want(x) for x in step.ins if x is not None)
        dh, name = _own_dy(b, step), "gated_product_and_bwd"
        if dh is not None and all(map(b.wants, step.ins)) and self.has_kernel(b, name, dh):
            # one kernel makes the product and both gradients; the product may overwrite its own gradient, dh
            b.values[step.y] = b.item(b.dispatched(name, self.kind, dh, gate, up, tail=(*tail, True)), 0)
        elif b.is_reference(gate, self.kind, "gated_product", "gated_product_bwd"):
            activated = b.call(self.again_under(b), gate)
            b.shared[step.y] = (activated,)
            b.values[step.y] = b.call(operator.mul, activated, up)
        else:
            b.values[step.y] = b.dispatched("gated_product", self.kind, gate, up, tail=tail)

    def backward(self, b: Backward, step: Step) -> None:
        gate, up = step.ins
        assert gate is not None and up is not None
        again, first = b.values.get(step.y), 0
        tail = (self.again_under(b), self.kind, self.options)
        found: Any
        if again is not None and again.target is operator.getitem:
            # the kernel in `rebuild` returned both gradients behind the product
            found, first = again.args[0], 1
        elif step.y in b.shared:
            args = *b.shared[step.y], self.kind, self.options
            found = b.call(gated_product_bwd_of, b.dy(step), b.want(gate), b.want(up), *args)
        else:
            found = b.dispatched("gated_product_bwd", self.kind, b.dy(step), b.want(gate), b.want(up), tail=tail)
        b.give(up, b.item(found, first + 1))
        b.give(gate, b.item(found, first))


def _own_dy(b: Backward, step: Step) -> Node | None:
    """The gradient of the step's output, if it is complete, and a matmul's output that nothing else reads."""
    dy = b.gradients.get(step.y)
    if dy is None or b.rows.get(dy, dy).target is not torch.mm:
        return None
    return dy if len(b.read_by(step.y)) == 1 else None


@dataclass(frozen=True)
class Dropout(Operation):
    """y and the generator's state before the draw."""

    p: float
    by_rows: ClassVar[bool] = True
    same: ClassVar[bool] = True

    @property
    def draws(self) -> bool:
        return True

    def forward(self, e: Emitter, x: Node) -> tuple[Node, ...]:
        like: Any = torch.empty_like(e.meta(x)), torch.empty(0, dtype=torch.uint8)
        both = e.call(dropout_fwd, x, self.p, like=lambda *_: like)
        return e.item(both, 0), e.item(both, 1)

    def _replay(self, b: Backward, step: Step, x: Node) -> Node:
        state = b.want(step.outs[1])
        return b.dispatched("dropout_replay", None, x, state, self.p, like=lambda y, *_: torch.empty_like(y))

    def rebuild(self, b: Backward, step: Step) -> None:
        b.values[step.y] = self._replay(b, step, b.want(step.x))

    def backward(self, b: Backward, step: Step) -> None:
        b.give(step.x, self._replay(b, step, b.dy(step)))


@dataclass(frozen=True)
class Rope(Operation):
    """y = x turned by the angles cos and sin [B or 1, T, D]; the heads of x are at `dim`."""

    dim: int

    def _angles(self, e: Emitter, cos: Node, sin: Node) -> tuple[Node, Node]:
        return e.once(torch.unsqueeze, cos, self.dim), e.once(torch.unsqueeze, sin, self.dim)

    def forward(self, e: Emitter, x: Node, cos: Node, sin: Node) -> Node:
        return e.dispatched("rope_fwd", None, x, *self._angles(e, cos, sin))

    def backward(self, b: Backward, step: Step) -> None:
        x, cos, sin = (value for value in step.ins if value is not None)
        angles = self._angles(b, b.want(cos), b.want(sin))
        b.give(x, b.dispatched("rope_bwd", None, b.dy(step), *angles, b.dtype_of(x)))
