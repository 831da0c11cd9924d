"""DoRA's magnitudes (arXiv 2402.09353) as operations: each output feature of a linear layer and its adapter is scaled.

PEFT divides the magnitudes by the norms of the adapted weight, which count as constants in backward. Its own code
computes these norms here, too.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from .arithmetic import Cast
from .backward import Backward
from .broadcast import Shift
from .emit import CallSetting, Emitter
from .operations import Linear
from .recorder import Recorder
from .refusal import NotStraight
from .step import Operation, Step


class Norms:
    """The norms of the rows of weight + scaling * B A, under the autocast of a setting. It holds no weight."""

    def __init__(self, of: Magnitude, setting: CallSetting) -> None:
        self.of, self.setting = of, setting
        self.__name__, self.__module__ = "norms", __name__

    def __call__(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        of = self.of
        layer = of.kind.__new__(of.kind)
        layer.__dict__.update(_parameters={}, _modules={}, _buffers={}, _dora_cache={}, training=True)
        layer.__dict__["fan_in_fan_out"] = of.transposed
        with self.setting.autocasting(weight):
            product = layer.get_lora_weight(lora_A=_Product(a), lora_B=_Product(b), adapter_name=None)
            norms: Tensor = layer.get_weight_norm(
                weight=weight.to(of.dtype), lora_weight=product.to(of.dtype), scaling=of.scaling, adapter_name=None
            )
        return norms


class _Product:
    """Stands for a linear layer in PEFT's code."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


@dataclass(frozen=True)
class Magnitude(Operation):
    """Outputs: magnitude / norms, and the norms, [O]. Inputs: magnitude [O]; weight, A and B, which are constants.

    Attributes:
        kind: The class of PEFT's module.
        transposed: Whether the weight is [I, O].
        scaling: The factor of the adapter.
        dtype: The dtype in which the norms are computed.
    """

    kind: Any = field(repr=False)
    transposed: bool
    scaling: float
    dtype: torch.dtype

    def forward(self, e: Emitter, magnitude: Node, weight: Node, a: Node, b: Node) -> tuple[Node, Node]:
        norms = e.call(Norms(self, e.setting), weight, a, b, like=self._like)
        return e.call(operator.truediv, magnitude, norms), norms

    def _like(self, weight: Tensor, *_: Tensor) -> Tensor:
        return torch.empty(weight.size(1 if self.transposed else 0), dtype=self.dtype, device="meta")

    def rebuild(self, b: Backward, step: Step) -> None:
        (magnitude, *_), (out, norms) = step.ins, step.outs
        b.values[out] = b.call(operator.truediv, b.want(magnitude), b.want(norms))  # type: ignore[arg-type]

    def backward(self, b: Backward, step: Step) -> None:
        if b.wants(step.x):
            b.give(step.x, b.call(operator.truediv, b.dy(step), b.want(step.outs[1])))


@dataclass(frozen=True)
class Rescaled(Operation):
    """(scale - 1) * base + scale * added * scaling, of scale [O] and two tensors [..., O] in one dtype.

    PEFT adds it to the layer's own output. `base` is the product of the layer, `added` that of its adapter.
    """

    scaling: float

    def forward(self, e: Emitter, scale: Node, base: Node, added: Node) -> Node:
        own = e.call(operator.mul, e.once(operator.sub, scale, 1), base)
        return e.call(operator.add, own, e.call(operator.mul, e.call(operator.mul, scale, added), self.scaling))

    def backward(self, b: Backward, step: Step) -> None:
        scale, base, added = (x for x in step.ins if x is not None)
        dy, of = b.dy(step), b.want(scale)
        scaled = b.call(operator.mul, dy, self.scaling)
        if b.wants(scale):
            for gradient, factor in ((scaled, added), (dy, base)):
                product = b.call(operator.mul, gradient, b.want(factor))
                b.give(scale, b.call(torch.Tensor.sum_to_size, product, *b.shape_of(scale)))
        if b.wants(added):
            b.give(added, b.call(operator.mul, scaled, of))
        if b.wants(base):
            b.give(base, b.call(operator.mul, dy, b.once(operator.sub, of, 1)))


@dataclass(frozen=True)
class AnotherProduct(Linear):
    """A product with a weight that another product reads, too."""


def is_dora(module: nn.Module) -> bool:
    """Whether a module is PEFT's `DoraLinearLayer`, which has the magnitudes of a linear layer."""
    dora = sys.modules.get("peft.tuners.lora.dora")
    return dora is not None and type(module) is dora.DoraLinearLayer


def dora(
    recorder: Recorder, module: Any, x: Tensor, *, lora_A: Any, lora_B: Any, scaling: float, base_layer: Any,
    base_result: Tensor | None = None, adapter_name: str = "",
) -> Tensor:  # fmt: skip
    """The forward of PEFT's DoRA module while a layer is recorded."""
    weight, bias = base_layer._parameters["weight"], base_layer._parameters.get("bias")
    if lora_B._parameters.get("bias") is not None:
        raise NotStraight("an adapter of DoRA has a bias")
    magnitude = module._parameters["weight"]
    operation = Magnitude(type(module), module.fan_in_fan_out, float(scaling), x.dtype)
    norms = torch.empty(magnitude.shape, dtype=x.dtype, device="meta")
    scale = torch.empty(norms.shape, dtype=torch.promote_types(x.dtype, magnitude.dtype), device="meta")
    recorder.note(operation, (magnitude, weight, lora_A.weight, lora_B.weight), scale, norms)
    added = lora_B(lora_A(x))
    if base_result is None:
        # x has gone through the adapter's dropout, so the layer's own product is of another input
        base_result = _product(recorder, x, weight, module.fan_in_fan_out)
    elif bias is not None:
        base_result = _noted(recorder, Shift(negative=True), torch.sub, base_result, bias)
    if any(torch.promote_types(scale.dtype, part.dtype) != scale.dtype for part in (base_result, added)):
        raise NotStraight("DoRA's magnitudes are of a narrower dtype than what they scale")
    y = torch.empty(base_result.shape, dtype=scale.dtype, device="meta")
    recorder.note(Rescaled(float(scaling)), (scale, base_result, added), y)
    return y


def _product(recorder: Recorder, x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    if weight.dtype != x.dtype and recorder.autocast is None:
        weight = _noted(recorder, Cast(x.dtype), lambda w: w.to(x.dtype), weight)
    width = weight.size(1 if transposed else 0)
    y = torch.empty(*x.shape[:-1], width, dtype=recorder.autocast or x.dtype, device="meta")
    recorder.note(AnotherProduct(transposed), (x, weight, None), y)
    return y


def _noted(recorder: Recorder, operation: Operation, function: Callable[..., Tensor], *ins: Tensor) -> Tensor:
    with recorder.silently():
        y = function(*ins)
    recorder.note(operation, ins, y)
    return y
