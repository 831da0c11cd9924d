"""Patched gated MLPs. They call their children and read none of their weights, because a child may be an adapter or a
quantised layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import compilation, ops
from ..ops import traced_kernels
from .base import has_hooks, keeps_for_backward, only_tensor, settings_of
from .leaves import ActivationSettings, as_it_is
from .tiled import TiledMixin, TiledSettings


@dataclass(frozen=True, kw_only=True)
class GatedMLPSettings(TiledSettings):
    """A gated MLP's settings: the names of its children, in the order that its mixin expects."""

    children: tuple[str, ...]


class _GatedMLPMixin(TiledMixin):
    actcompress: GatedMLPSettings | None
    # what the MLP computes, of its input and its children
    _gated: Callable[..., Tensor]

    def whole(self, *args: Any, **kwargs: Any) -> Tensor:
        x, settings = only_tensor(args, kwargs), self.actcompress
        if x is None or settings is None:
            return self.stock_forward()(*args, **kwargs)  # type: ignore[no-any-return]
        return self._gated(x, *[getattr(self, name) for name in settings.children])

    def _product(self, gate: Tensor, up: Tensor, act: Any) -> Tensor:
        """act(gate) * up; by our op if the activation is a patched one without hooks."""
        activation, settings = settings_of(act), self.actcompress
        if not isinstance(activation, ActivationSettings) or settings is None or has_hooks(act):
            return act(gate) * up  # type: ignore[no-any-return]
        if not keeps_for_backward(gate, up):
            return act(gate) * up  # type: ignore[no-any-return]
        if compilation.is_traced():
            of_gate, of_up = (compilation.part_of(settings.codec_name, name) for name in ("gate", "up"))
            gate, up = compilation.keep(gate, of_gate), compilation.keep(up, of_up)
            known = as_it_is(act) if compilation.is_traced_plan() else None
            h = None if known is None else traced_kernels.gated_product(gate, up, known[0], activation.kind, known[1])
            if h is not None:
                return h
            return act.stock_forward()(gate) * up  # type: ignore[no-any-return]
        found = as_it_is(act)
        if found is None:
            return act(gate) * up  # type: ignore[no-any-return]
        stock, constants = found
        return ops.gated_product(gate, up, stock, activation.kind, constants, codec=settings.codec)


class SplitGatedMLPMixin(_GatedMLPMixin):
    """down(act(gate(x)) * up(x)); children: gate, up, down and act."""

    def _gated(self, x: Tensor, gate: Any, up: Any, down: Any, act: Any) -> Tensor:
        return down(self._product(gate(x), up(x), act))  # type: ignore[no-any-return]


class FusedGatedMLPMixin(_GatedMLPMixin):
    """down(act(gate) * up), where gate and up are halves of one projection; children: that projection, down and act."""

    def _gated(self, x: Tensor, both: Any, down: Any, act: Any, *rest: Any) -> Tensor:
        gate, up = both(x).chunk(2, dim=-1)
        h = self._product(gate, up, act)
        for dropout in rest:  # between the product and the last projection
            h = dropout(h)
        return down(h)  # type: ignore[no-any-return]


class T5GatedMLPMixin(_GatedMLPMixin):
    """T5's wo(dropout(act(wi_0(x)) * wi_1(x))), with its cast to wo's dtype."""

    def _gated(self, x: Tensor, gate: Any, up: Any, down: Any, act: Any, dropout: Any) -> Tensor:
        h = dropout(self._product(gate(x), up(x), act))
        weight = getattr(down, "weight", None)
        if isinstance(weight, Tensor) and weight.dtype not in (h.dtype, torch.int8):
            h = h.to(weight.dtype)
        return down(h)  # type: ignore[no-any-return]
