"""Activations, products with them, dropout and rotary embeddings as operations: nothing of them is kept but inputs."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Node

from ..codecs import Codec
from ..models.probe import same_bits
from ..ops.activation import SIGN_DECIDES
from ..reference import rng_state
from ..reference.activation import gelu_new_bwd, gelu_new_parts
from ..reference.gated_mlp import gated_product_bwd_of
from .emit import Bound, Emitter, Setting
from .step import Backward, Operation, Step
from .tape import plain


@dataclass(frozen=True)
class Activation(Operation):
    """y = act(x); `kind` and `options` name the derivative, a row of `reference.ACTIVATIONS`."""

    act: nn.Module
    kind: str
    options: tuple[float, ...]
    keeps: ClassVar[int] = 1

    def codec_of(self, step: Step, value: int) -> Codec:
        return step.codec.keeping_sign() if self.kind in SIGN_DECIDES and value == step.ins[0] else step.codec

    def key(self) -> Hashable:
        return type(self), plain(self.act), self.kind, self.options

    @property
    def stock(self) -> Any:
        act: Any = self.act
        return act.stock_forward()

    def again_under(self, b: Emitter) -> Any:
        """The same under the autocast of the forward: a backward runs without."""
        return Under(self.stock, b.setting) if b.setting.autocast else Called(self.stock)

    def forward(self, e: Emitter, x: Node) -> Node:
        return e.call(Called(self.stock), x)

    def repeat(self, e: Emitter, x: Node) -> Node:  # type: ignore[override]
        return e.call(self.again_under(e), x)

    def rebuild(self, b: Backward, step: Step) -> None:
        (x,) = step.ins
        assert x is not None
        if self._is_gelu_new(b, x):
            parts = b.call(gelu_new_parts, b.want(x))
            b.shared[step.outs[0]] = b.item(parts, 0), b.item(parts, 1)
            b.values[step.outs[0]] = b.call(operator.mul, b.want(x), b.item(parts, 1))
            return
        tail = (self.again_under(b), self.kind, self.options, b.dtype_of(step.outs[0]))
        b.values[step.outs[0]] = b.dispatched("activation_value", self.kind, b.want(x), tail=tail)

    def backward(self, b: Backward, step: Step) -> None:
        (x,) = step.ins
        assert x is not None
        if step.outs[0] in b.shared:
            b.give(x, b.call(gelu_new_bwd, b.dy(step), b.want(x), *b.shared[step.outs[0]]))
            return
        b.give(x, b.dispatched("activation_bwd", self.kind, b.dy(step), b.want(x), self.kind, self.options))

    def _is_gelu_new(self, b: Backward, x: int) -> bool:
        """Whether it is composed as `gelu_new_parts` is, whose tanh the derivative reads, too."""
        dtype, device = b.dtype_of(x), b.setting.device
        if self.kind != "gelu_new" or b.setting.autocast is not None or dtype.itemsize < 4:
            return False
        if not b.is_reference(b.want(x), self.kind, "activation_value", "activation_bwd"):
            return False
        tried = torch.linspace(-8.0, 8.0, 1001, dtype=dtype, device=device)
        return same_bits(self.stock(tried), tried * gelu_new_parts(tried)[1])


@dataclass(frozen=True)
class GatedProduct(Activation):
    """y = act(gate) * up."""

    keeps: ClassVar[int] = 2

    def forward(self, e: Emitter, gate: Node, up: Node) -> Node:  # type: ignore[override]
        return e.call(operator.mul, e.call(Called(self.stock), gate), up)

    def repeat(self, e: Emitter, gate: Node, up: Node) -> Node:  # type: ignore[override]
        return e.call(operator.mul, e.call(self.again_under(e), gate), up)

    def rebuild(self, b: Backward, step: Step) -> None:
        tail = (self.again_under(b), self.kind, self.options, b.dtype_of(step.outs[0]))
        gate, up = (b.want(x) for x in step.ins if x is not None)
        if b.is_reference(gate, self.kind, "gated_product", "gated_product_bwd"):
            activated = b.call(self.again_under(b), gate)
            b.shared[step.outs[0]] = (activated,)
            b.values[step.outs[0]] = b.call(operator.mul, activated, up)
            return
        b.values[step.outs[0]] = b.dispatched("gated_product", self.kind, gate, up, tail=tail)

    def backward(self, b: Backward, step: Step) -> None:
        gate, up = step.ins
        assert gate is not None and up is not None
        tail = (self.again_under(b), self.kind, self.options)
        if step.outs[0] in b.shared:
            args = *b.shared[step.outs[0]], self.kind, self.options
            both = b.call(gated_product_bwd_of, b.dy(step), b.want(gate), b.want(up), *args)
        else:
            both = b.dispatched("gated_product_bwd", self.kind, b.dy(step), b.want(gate), b.want(up), tail=tail)
        b.give(up, b.item(both, 1))
        b.give(gate, b.item(both, 0))


class Called(Bound):
    """A stock activation; `torch.fx` wants a name."""

    def __init__(self, stock: Any) -> None:
        super().__init__(stock.func, ())
        self.function = stock


class Under:
    """A function that always runs under the autocast of a setting. Weights are no part of it: nothing is cached."""

    def __init__(self, function: Any, setting: Setting) -> None:
        self.function, self.device, self.dtype = function, setting.device.type, setting.autocast
        self.__name__, self.__module__ = "under_autocast", __name__

    def __call__(self, x: Tensor) -> Any:
        if x.is_meta:
            return self.function(x)
        with torch.autocast(self.device, self.dtype, cache_enabled=False):
            return self.function(x)


def _like_first(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


@dataclass(frozen=True)
class Dropout(Operation):
    """y and the generator's state before the draw."""

    p: float
    same: ClassVar[bool] = True

    @property
    def draws(self) -> bool:
        return True

    def forward(self, e: Emitter, x: Node) -> tuple[Node, ...]:
        state = e.call(rng_state, e.setting.device)
        return e.call(torch.nn.functional.dropout, x, self.p, True), state

    def _replay(self, b: Backward, step: Step, x: Node) -> Node:
        return b.dispatched("dropout_replay", None, x, b.want(step.outs[1]), self.p, like=_like_first)

    def rebuild(self, b: Backward, step: Step) -> None:
        (x,) = step.ins
        assert x is not None
        b.values[step.outs[0]] = self._replay(b, step, b.want(x))

    def backward(self, b: Backward, step: Step) -> None:
        b.give(step.ins[0], self._replay(b, step, b.dy(step)))


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
