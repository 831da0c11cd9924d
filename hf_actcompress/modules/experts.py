"""Patched experts of transformers' experts interface, with grouped products.

For each pair of token and expert the output of the first projection is kept. The gathered inputs, the activation, the
gated product and the output of the second projection are not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn

from .. import compilation, ops
from ..ops import traced_experts
from ..ops.experts import GroupedProducts
from ..records import declare, known_record, stored_exact, whole_record_of
from .base import ModuleMixin, Settings, has_hooks, keeps_for_backward

GROUPED = "grouped_mm"


@dataclass(frozen=True, kw_only=True)
class ExpertsSettings(Settings):
    """The settings of experts: stock's grouped products for weights that lie in memory as this module's do."""

    products: GroupedProducts


class ExpertsMixin(ModuleMixin):
    """Experts that are called with hidden_states [T, H], top_k_index [T, K] and top_k_weights [T, K]."""

    actcompress: ExpertsSettings | None
    config: Any
    num_experts: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    has_post_expert_norm: bool
    _is_expert_parallel: bool
    _apply_gate: Callable[[Tensor], Tensor]
    act_fn: Callable[[Tensor], Tensor]
    down_proj: Tensor
    down_proj_bias: Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = _three(args, kwargs)
        settings = self.actcompress
        if given is None or settings is None or not self._is_ordinary():
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]
        up, down = getattr(self, self._first), self.down_proj
        up_bias = getattr(self, f"{self._first}_bias") if self.has_bias else None
        down_bias = self.down_proj_bias if self.has_bias else None
        if not keeps_for_backward(*given[::2], up, down, up_bias, down_bias):
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]
        return self._grouped(*given, (up, up_bias), (down, down_bias))

    @property
    def _first(self) -> str:
        return "gate_up_proj" if self.has_gate else "up_proj"

    def _is_ordinary(self) -> bool:
        """Whether stock would run its grouped products here, and nothing else."""
        grouped = getattr(self.config, "_experts_implementation", None) == GROUPED
        special = self._is_expert_parallel or self.has_post_expert_norm
        special = special or (compilation.is_traced() and not compilation.is_traced_plan())
        return grouped and not special and not has_hooks(getattr(self, "act_fn", nn.Identity()))

    def _grouped(
        self,
        hidden: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        up: tuple[Any, Tensor | None],
        down: tuple[Any, Tensor | None],
    ) -> Tensor:
        assert self.actcompress is not None
        codec, choices = self.actcompress.codec, top_k_index.size(-1)
        experts, order = torch.sort(top_k_index.reshape(-1))
        tokens = order // choices
        routing = top_k_weights.reshape(-1)[order]
        offsets = self._ends(experts)
        products = self.actcompress.products
        x = _gathered(hidden, tokens, up[0].dtype)
        both = products.forward(x, up[0], offsets, None if up[1] is None else up[1][experts])
        code = _gate_of if self.has_gate else _activation_of
        if compilation.is_traced():
            h = code(self)(compilation.keep(both, self.actcompress.codec_name))
            y = traced_experts.experts_down(h, *down, routing, experts, offsets, products=products)
        else:
            h = ops.recomputed(both, code(self), ops.Snapshot(self, code, weights="none"), codec=codec)
            y = ops.experts_down(h, *down, routing, experts, offsets, products, codec=codec)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.size(0), device=order.device)
        # each token has one row per chosen expert; torch sums them in fp32
        return y[back].view(hidden.size(0), choices, -1).sum(dim=1).to(hidden.dtype)

    def _ends(self, experts: Tensor) -> Tensor:
        """[E], int32: where the rows of each expert end."""
        counted = experts.float() if experts.device.type in ("cpu", "mps") else experts.int()
        counts = torch.histc(counted, bins=self.num_experts, min=0, max=self.num_experts - 1)
        return torch.cumsum(counts, dim=0, dtype=torch.int32)


def _gate_of(module: Any) -> Any:
    return module._apply_gate


def _activation_of(module: Any) -> Any:
    return module.act_fn


def _three(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor] | None:
    """The three tensors of a call, by position or by stock's names."""
    names = ("hidden_states", "top_k_index", "top_k_weights")
    given = (*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs))
    if len(given) != 3 or len(args) + len(kwargs) != 3 or not all(isinstance(x, Tensor) for x in given):
        return None
    return given  # type: ignore[return-value]


def _gathered(hidden: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows of those tokens [S, H], declared as derived from the rows of all tokens."""
    x = hidden[tokens]
    if compilation.is_traced():
        return x.to(dtype)
    # the record with padding rows, because these are routed to experts, too
    declare(x, getitem, whole_record_of(hidden), stored_exact(tokens))
    if x.dtype == dtype:
        return x
    known, cast = known_record(x), x.to(dtype)
    if known is not None:
        declare(cast, lambda rows: rows.to(dtype), known)
    return cast
