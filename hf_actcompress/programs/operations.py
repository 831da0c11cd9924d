"""The operations of programs: how each is computed, made again and differentiated, in torch calls that are written
down once (`emit`). The calls and their order are those of the leaf path's ops, so that values and gradients are
bit-equal to those of the leaf path.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from ..reference import linear_fwd
from ..reference.rms_norm import applies_gain_in_fp32, rms_norm_normed, rms_norm_weight_bwd
from .backward import Backward
from .emit import Emitter
from .step import Operation, Step
from .views import rows_of, tokens_of


def _transposed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear_fwd(x, weight, bias, True)


@dataclass(frozen=True)
class Linear(Operation):
    """y = x W^T + b, or x W + b if `transposed` (transformers' Conv1D). Inputs: x, weight, bias."""

    transposed: bool
    keeps: ClassVar[int] = 1
    by_rows: ClassVar[bool] = True
    again: ClassVar[bool] = False
    multiplies: ClassVar[bool] = True

    def forward(self, e: Emitter, x: Node, weight: Node, bias: Node | None) -> Node:
        x, weight, bias = (e.cast(t, e.setting.autocast) for t in (x, weight, bias))
        if not self.transposed:
            return e.call(torch.nn.functional.linear, x, weight, bias)
        if e.meta(x).dim() > 2:
            return e.call(_transposed_linear, x, weight, bias)
        return e.call(torch.mm, x, weight) if bias is None else e.call(torch.addmm, bias, x, weight)

    def backward(self, b: Backward, step: Step) -> None:
        x, weight, bias = step.ins
        assert x is not None and weight is not None
        dtype = b.dtype_of(step.y)
        dy = b.dy(step)
        rows = rows_of(b, dy)
        if b.wants(x):
            w = b.cast(b.want(weight), dtype)
            w = b.call(torch.Tensor.t, w) if self.transposed else w
            b.give(x, tokens_of(b, b.call(torch.mm, rows, w), dy))
        if b.wants(weight):
            x_rows = rows_of(b, b.want_in(x, dtype))
            left, right = (x_rows, rows) if self.transposed else (rows, x_rows)
            b.give(weight, b.call(torch.mm, b.once(torch.Tensor.t, left), right))
        if b.wants(bias):
            b.give(bias, b.call(torch.Tensor.sum, rows, 0))


@dataclass(frozen=True)
class RMSNorm(Operation):
    """y and rstd of x and weight; `formula` is a row of `reference.RMS_NORM_FORMULAS`."""

    eps: float | None
    formula: str
    keeps: ClassVar[int] = 1
    by_rows: ClassVar[bool] = True

    def forward(self, e: Emitter, x: Node, weight: Node | None) -> tuple[Node, ...]:
        both = e.dispatched("rms_norm_fwd", self.formula, x, weight, self.eps, self.formula)
        return e.item(both, 0), e.item(both, 1)

    def rebuild(self, b: Backward, step: Step) -> None:
        weight = step.ins[1]
        gain = None if weight is None else b.want(weight)
        args = b.want(step.x), b.want(step.outs[1]), gain, self.formula
        if self._shares(b, step):
            normed = b.call(rms_norm_normed, *args)
            b.shared[step.y] = (normed,)
            b.values[step.y] = b.call(operator.mul, gain, normed)
        else:
            b.values[step.y] = b.dispatched("rms_norm_rebuild", self.formula, *args)

    def _shares(self, b: Backward, step: Step) -> bool:
        """Whether x / rms(x) is made once for y and for the gradient of the gain."""
        weight = step.ins[1]
        if not b.wants(weight) or applies_gain_in_fp32(b.meta(b.want(weight)), self.formula):  # type: ignore[arg-type]
            return False
        return b.is_reference(b.want(step.x), self.formula, "rms_norm_rebuild", "rms_norm_bwd")

    def backward(self, b: Backward, step: Step) -> None:
        x, weight = step.x, step.ins[1]
        gain = None if weight is None else b.want(weight)
        shared = step.y in b.shared
        if shared:
            # first, so that the shared x / rms(x) is freed early
            b.give(weight, b.call(rms_norm_weight_bwd, b.dy(step), *b.shared[step.y], gain))
        needed = b.wants(x), b.wants(weight) and not shared
        if not any(needed):
            return
        # the kernel adds its own gradient to the one that x has already, which saves a pass
        args = b.dy(step), b.want(x), gain, b.want(step.outs[1]), self.formula, needed, b.gradients.pop(x, None)
        both = b.dispatched("rms_norm_bwd", self.formula, *args)
        b.give_each(step.ins[:1] if shared else step.ins, both)


@dataclass(frozen=True)
class LayerNorm(Operation):
    """y, mean and rstd of x, weight and bias."""

    shape: tuple[int, ...]
    eps: float
    keeps: ClassVar[int] = 1

    def structure(self) -> Hashable:
        return len(self.shape), self.eps

    @property
    def works_by_rows(self) -> bool:
        return len(self.shape) == 1

    def _inputs(self, e: Emitter, nodes: tuple[Node | None, ...]) -> list[Any]:
        # autocast runs LayerNorm in fp32 everywhere but on a CPU
        wide = e.setting.autocast is not None and e.setting.device.type != "cpu"
        return [e.cast(node, torch.float32 if wide else None) for node in nodes]

    def forward(self, e: Emitter, *ins: Node | None) -> tuple[Node, ...]:
        x, weight, bias = self._inputs(e, ins)
        found = e.dispatched("layer_norm_fwd", None, x, self.shape, weight, bias, self.eps)
        return tuple(e.item(found, i) for i in range(3))

    def backward(self, b: Backward, step: Step) -> None:
        x, weight, bias = self._inputs(b, tuple(None if value is None else b.want(value) for value in step.ins))
        mean, rstd = (b.want(value) for value in step.outs[1:])
        needed = tuple(b.wants(value) for value in step.ins)
        # as in RMSNorm; but dx of an input that was cast for the norm is cast back before it is added
        residual = b.gradients.pop(step.x, None) if b.dtype(x) == b.dtype_of(step.x) else None
        args = b.dy(step), x, self.shape, mean, rstd, weight, bias, needed, residual
        b.give_each(step.ins, b.dispatched("layer_norm_bwd", None, *args))
