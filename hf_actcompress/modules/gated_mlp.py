"""Patched gated MLPs. They call their children, whatever those have become (adapters, quantised layers), and read none
of their weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import compilation, ops
from ..roles import Role
from .base import Settings, has_hooks, keeps_for_backward, only_tensor, settings_of
from .tiled import TiledMixin


class _GatedMLPMixin(TiledMixin):
    # of the last projection among the options
    last_index: int

    def last(self) -> nn.Module | None:
        assert self.actcompress is not None
        return self._modules[self.actcompress.options[self.last_index]]

    def _product(self, gate: Tensor, up: Tensor, act: Any) -> Tensor:
        """act(gate) * up; through our op if the activation is a patched one that nobody hooks."""
        activation, settings = settings_of(act), self.actcompress
        if activation is None or activation.role != Role.ACTIVATION or settings is None or has_hooks(act):
            return act(gate) * up  # type: ignore[no-any-return]
        if not keeps_for_backward(gate, up):
            return act(gate) * up  # type: ignore[no-any-return]
        stock, options = act.stock_forward(), activation.options
        if torch.compiler.is_compiling():
            gate, up = (compilation.keep(x, settings.codec_name) for x in (gate, up))
            return stock(gate) * up  # type: ignore[no-any-return]
        return ops.gated_product(gate, up, stock, activation.variant, options, codec=settings.codec)

    def _parts(self, settings: Settings) -> list[Any]:
        return [getattr(self, name) for name in settings.options]


class SplitGatedMLPMixin(_GatedMLPMixin):
    """down(act(gate(x)) * up(x)); options: the names of gate, up, down and act."""

    last_index = 2

    def whole(self, *args: Any, **kwargs: Any) -> Tensor:
        x, settings = only_tensor(args, kwargs), self.actcompress
        if x is None or settings is None:
            return self.stock_forward()(*args, **kwargs)  # type: ignore[no-any-return]
        gate, up, down, act = self._parts(settings)
        return down(self._product(gate(x), up(x), act))  # type: ignore[no-any-return]


class FusedGatedMLPMixin(_GatedMLPMixin):
    """down(act(gate) * up) with gate and up the halves of one projection; options: the names of it, down and act."""

    last_index = 1

    def whole(self, *args: Any, **kwargs: Any) -> Tensor:
        x, settings = only_tensor(args, kwargs), self.actcompress
        if x is None or settings is None:
            return self.stock_forward()(*args, **kwargs)  # type: ignore[no-any-return]
        both, down, act, *rest = self._parts(settings)
        gate, up = both(x).chunk(2, dim=-1)
        h = self._product(gate, up, act)
        for dropout in rest:  # between the product and the last projection
            h = dropout(h)
        return down(h)  # type: ignore[no-any-return]


class T5GatedMLPMixin(_GatedMLPMixin):
    """T5's wo(dropout(act(wi_0(x)) * wi_1(x))), with its cast to wo's dtype."""

    last_index = 2

    def whole(self, *args: Any, **kwargs: Any) -> Tensor:
        x, settings = only_tensor(args, kwargs), self.actcompress
        if x is None or settings is None:
            return self.stock_forward()(*args, **kwargs)  # type: ignore[no-any-return]
        gate, up, down, act, dropout = self._parts(settings)
        h = dropout(self._product(gate(x), up(x), act))
        weight = getattr(down, "weight", None)
        if isinstance(weight, Tensor) and weight.dtype not in (h.dtype, torch.int8):
            h = h.to(weight.dtype)
        return down(h)  # type: ignore[no-any-return]
