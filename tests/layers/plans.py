"""Models whose layers run by plans, and what their plans did."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.config import PRESETS
from hf_actcompress.layers import LayerSettings, PlannedLayer
from hf_actcompress.modules.base import settings_of
from tests.families import Batch, step

# the head is stock's, so that every gradient can have stock's bits
PLANS = CompressionConfig(loss_head=False)


def by_plans(preset: str) -> CompressionConfig:
    """A preset with stock's head, whose layers run by plans."""
    return replace(PRESETS[preset], loss_head=False)


def plans_of(model: nn.Module) -> list[PlannedLayer]:
    """The plans of each layer."""
    found = [settings_of(module) for module in model.modules()]
    return [settings.plans for settings in found if isinstance(settings, LayerSettings)]


def assert_all_ran(model: nn.Module) -> None:
    """No call of a layer went leaf by leaf."""
    assert plans_of(model)
    assert [(plans.calls > 0, plans.why) for plans in plans_of(model)] == [(True, "")] * len(plans_of(model))


def assert_stock_bits(model: Any, batch: Batch, mode: str = "fp32", config: CompressionConfig = PLANS) -> Any:
    """A step of the model by plans has stock's bits in the loss and in every gradient. Returns the patched model."""
    ours = patch_model(copy.deepcopy(model), config)
    (loss, stock), (found, grads) = step(model, batch, mode), step(ours, batch, mode)
    assert torch.equal(loss, found)
    assert stock.keys() == grads.keys()
    assert not [name for name, x in stock.items() if not torch.equal(x, grads[name])]
    assert_all_ran(ours)
    return ours
