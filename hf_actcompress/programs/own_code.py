"""Modules of a model's own making that are a cheap function of one tensor and their weights: Cohere's norm, Nemotron's.

Their own code runs in the forward, and again in backward, as in `ops.recomputed`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Node

from ..modules.base import stock_type
from ..ops.snapshot import alias
from .backward import Backward
from .emit import Emitter, UnderAutocast
from .step import Operation, Step
from .tape import plain


class OwnCode:
    """The code of a module as a function of its input and its weights. It holds no weight."""

    def __init__(self, module: nn.Module) -> None:
        self.kind, self.names = stock_type(module), tuple(n for n, w in module._parameters.items() if w is not None)
        self.key: Hashable = (self.kind, plain(module), self.names)
        self._rest = {name: value for name, value in vars(module).items() if name not in ("_parameters", "actcompress")}
        self.__name__, self.__module__ = "own_code", __name__

    def __call__(self, x: Tensor, *weights: Tensor) -> Any:
        module = self.kind.__new__(self.kind)
        module.__dict__.update(self._rest)
        module.__dict__["_parameters"] = dict(zip(self.names, weights, strict=True))
        return self.kind.forward(module, x)


class Gradients:
    """Computes the gradients of own code, for those of x and the weights that want one."""

    def __init__(self, code: UnderAutocast, needed: tuple[bool, ...]) -> None:
        self.code, self.needed = code, needed
        self.__name__, self.__module__ = "gradients_of_own_code", __name__

    def __call__(self, dy: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        aliases = [alias(x, wanted) for x, wanted in zip(tensors, self.needed, strict=True)]
        with torch.enable_grad():
            y = self.code(*aliases)
        return torch.autograd.grad(y, [x for x in aliases if x.requires_grad], dy)


@dataclass(frozen=True)
class Recomputed(Operation):
    """y of x and the weights of a module."""

    code: OwnCode
    again: ClassVar[bool] = True
    differentiates: ClassVar[bool] = True

    def key(self) -> Hashable:
        return type(self), self.code.key

    def forward(self, e: Emitter, *ins: Node) -> Node:
        return e.call(UnderAutocast(self.code, e.setting), *ins)

    def backward(self, b: Backward, step: Step) -> None:
        values = [x for x in step.ins if x is not None]
        wanted = [x for x in values if b.wants(x)]
        gradients = Gradients(UnderAutocast(self.code, b.setting), tuple(map(b.wants, values)))
        found = b.call(gradients, b.dy(step), *map(b.want, values), like=lambda *_: b.empty(wanted))
        b.give_each(wanted, found)
