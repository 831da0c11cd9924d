"""Patched gated MLPs. They call their children, whatever those have become (adapters, quantised layers), and read none
of their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import ops
from .base import PatchedModule, has_hooks, keeps_for_backward

if TYPE_CHECKING:

    class _Module(PatchedModule, nn.Module):
        pass
else:
    _Module = PatchedModule


class _GatedMLPMixin(_Module):
    def _product(self, gate: Tensor, up: Tensor, act: Any) -> Tensor:
        """act(gate) * up; through our op if the activation is a patched one that nobody hooks."""
        if not isinstance(act, PatchedModule) or has_hooks(act) or not keeps_for_backward(gate, up):
            return act(gate) * up  # type: ignore[no-any-return]
        activation, codec = act.actcompress, self.actcompress.codec
        return ops.gated_product(gate, up, act.stock_forward(), activation.variant, activation.options, codec=codec)


class SplitGatedMLPMixin(_GatedMLPMixin):
    """down(act(gate(x)) * up(x)); options: the names of gate, up, down and act."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down, act = (getattr(self, name) for name in self.actcompress.options)
        return down(self._product(gate(x), up(x), act))  # type: ignore[no-any-return]


class FusedGatedMLPMixin(_GatedMLPMixin):
    """down(act(gate) * up) with gate and up the halves of one projection; options: the names of it, down and act.

    Variant "up_first" where the second half is the one that is activated.
    """

    def forward(self, x: Tensor) -> Tensor:
        both, down, act, *rest = self.actcompress.options
        gate, up = getattr(self, both)(x).chunk(2, dim=-1)
        if self.actcompress.variant == "up_first":
            gate, up = up, gate
        h = self._product(gate, up, getattr(self, act))
        for name in rest:  # dropout between the product and the last projection
            h = getattr(self, name)(h)
        return getattr(self, down)(h)  # type: ignore[no-any-return]


class T5GatedMLPMixin(_GatedMLPMixin):
    """T5's wo(dropout(act(wi_0(x)) * wi_1(x))), with its cast to wo's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down, act, dropout = (getattr(self, name) for name in self.actcompress.options)
        h = dropout(self._product(gate(x), up(x), act))
        weight = getattr(down, "weight", None)
        if isinstance(weight, Tensor) and weight.dtype not in (h.dtype, torch.int8):
            h = h.to(weight.dtype)
        return down(h)  # type: ignore[no-any-return]
