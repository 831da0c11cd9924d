"""Attention as an operation of a program: a fused kernel's forward and backward, called directly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from ..reference.dense_attention import dense_attention_bwd, dense_attention_fwd
from .backward import Backward
from .emit import Emitter
from .step import Operation, Step


@dataclass(frozen=True)
class Attention(Operation):
    """Outputs: out [B, H, T, D], logsumexp, and two that hold from what dropout was drawn. Inputs: q, k, v [B, H, T, D]
    and a mask or None.

    The kernel is that of the setting. It keeps q, k, v, all outputs, and the mask by reference.

    Attributes:
        derived: For q, k and v each, whether it can be made again from what is kept anyway, because a norm made it.
        dropout: The rate at which probabilities are dropped.
        causal: Whether the upper triangle is masked where there is no mask.
        scale: Factor on q k^T; None for D ** -0.5.
    """

    derived: tuple[bool, ...]
    dropout: float
    causal: bool
    scale: float | None
    again: ClassVar[bool] = False
    keeps: ClassVar[int] = 3
    keeps_output: ClassVar[bool] = True

    @property
    def draws(self) -> bool:
        return self.dropout > 0

    def forward(self, e: Emitter, q: Node, k: Node, v: Node, mask: Node | None) -> tuple[Node, ...]:
        q, k, v = (e.cast(x, e.setting.autocast) for x in (q, k, v))
        options = self.dropout, self.causal and mask is None, self.scale
        found = e.call(dense_attention_fwd, e.setting.kernel, q, k, v, mask, *options, like=_like_forward)
        return tuple(e.item(found, i) for i in range(4))

    def backward(self, b: Backward, step: Step) -> None:
        *heads, mask = step.ins
        dtype = b.dtype_of(step.y)
        dy = b.dy(step)
        kept = []
        for value, derived in zip(heads, self.derived, strict=True):
            assert value is not None
            kept.append(b.cast(b.want(value), dtype) if derived else b.want_itself(value, dtype))
        on_cpu = b.setting.kernel == "cpu"
        made = [None if on_cpu and i > 1 else b.want(value) for i, value in enumerate(step.outs)]
        of_mask = None if mask is None or not b.is_given(mask) else b.want(mask)
        args = *kept, *made[:2], of_mask, *made[2:], self.dropout, self.causal and of_mask is None, self.scale
        grads = b.call(dense_attention_bwd, b.setting.kernel, dy, *args, like=_like_backward)
        b.give_each(heads, grads)


def _like_forward(kernel: str, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    b, h, t, _d = q.shape
    out = q.new_empty(b, t, h, v.size(-1)).transpose(1, 2)
    drawn = None if kernel.startswith("cpu") else torch.empty(0, device="meta")
    return out, q.new_empty(b, h, t, dtype=torch.float32), drawn, drawn


def _like_backward(_: str, dy: Tensor, *qkv: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in qkv[:3])
