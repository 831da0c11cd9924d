"""Mixtures of experts whose class goes through transformers' experts interface."""

from __future__ import annotations

import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..codecs import IDENTITY, Codec
from ..codecs.table import CODECS
from ..config import CompressionConfig
from ..modules.base import patch_instance
from ..modules.experts import GROUPED, ExpertsMixin, ExpertsSettings
from ..roles import Role
from .grouped_products import GROUPED_PRODUCTS
from .probe import DTYPES, same_bits, undisturbed
from .sites import Declined, Site

_FLAGS = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")
_WEIGHTS = {"gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias"}


def find_experts(module: nn.Module, config: CompressionConfig) -> Site | Declined | None:
    """The site of a module of the interface that is called with grouped products."""
    if not all(hasattr(module, flag) for flag in _FLAGS) or "down_proj" not in module._parameters:
        return None
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if implementation != GROUPED:
        return Declined(Role.EXPERTS, f"stock's code runs: no rule for {implementation!r}, only for {GROUPED!r}")
    if module.has_post_expert_norm:
        return Declined(Role.EXPERTS, "stock's code runs: a norm after each expert")
    if {name for name, _ in module.named_parameters()} - _WEIGHTS:
        return Declined(Role.EXPERTS, "stock's code runs: weights beside those of the two projections")
    if not _same_as_stock():
        return Declined(Role.EXPERTS, "stock's code runs: its grouped products are not those known (found by a probe)")
    return Site(ExpertsMixin, _settings(module, CODECS[config.mlp]))


def _settings(module: Any, codec: Codec) -> ExpertsSettings:
    products = GROUPED_PRODUCTS[module.is_transposed]
    return ExpertsSettings(Role.EXPERTS, GROUPED, codec, "the first projection's output", products=products)


class _Experts(nn.Module):
    """Experts as the interface makes them, tiny."""

    def __init__(self, bias: bool, transposed: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(_experts_implementation=GROUPED)
        self.num_experts, self._is_expert_parallel = 4, False
        self.has_gate, self.has_bias, self.is_transposed, self.has_post_expert_norm = True, bias, transposed, False
        shapes: dict[str, tuple[int, ...]] = {"gate_up_proj": (4, 32, 16), "down_proj": (4, 16, 16)}
        if transposed:
            shapes = {name: (e, i, o) for name, (e, o, i) in shapes.items()}
        if bias:
            shapes |= {"gate_up_proj_bias": (4, 32), "down_proj_bias": (4, 16)}
        for name, shape in shapes.items():
            # no random numbers, because a probe must not draw any
            values = torch.linspace(0, 40, math.prod(shape)).cos().view(shape)
            setattr(self, name, nn.Parameter(values))

    def _apply_gate(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return torch.sigmoid(gate) * up

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = ALL_EXPERTS_FUNCTIONS[GROUPED](self, *args)
        return y


@cache
def _same_as_stock() -> bool:
    """Run tiny experts by transformers' function and by ours, in each dtype, with fp32 and narrow routing weights."""
    try:
        with undisturbed():
            hidden = torch.linspace(0, 500, 24 * 16).sin().view(24, 16)
            weights, index = hidden[:, :4].softmax(-1).topk(2)
            return all(
                _same(_Experts(bias, transposed).to(dtype), hidden.to(dtype), index, weights.to(routing))
                for bias in (False, True)
                for transposed in (False, True)
                for dtype in DTYPES[:2]
                for routing in {dtype, torch.float32}
            )
    except Exception:
        return False


def _same(experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> bool:
    stock = experts(hidden, index, weights)
    patch_instance(experts, ExpertsMixin, _settings(experts, IDENTITY))
    projections = [(getattr(experts, n), getattr(experts, f"{n}_bias", None)) for n in ("gate_up_proj", "down_proj")]
    return same_bits(stock, experts._grouped(hidden, index, weights, *projections))
