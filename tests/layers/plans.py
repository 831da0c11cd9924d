"""Models whose layers run by plans, beside stock or module by module, and what their plans did."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.config import PRESETS
from hf_actcompress.layers import LayerSettings, PlannedLayer
from hf_actcompress.modules.base import settings_of
from hf_actcompress.roles import Role
from tests.families import BY_NAME, Batch, step
from tests.oracle import kept_bytes as kept_by

# the head is stock's, so that every gradient can have stock's bits
PLANS = CompressionConfig(loss_head=False)
LEAVES = replace(PLANS, plans=False)
NAMES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "gpt2-gelu-new", "gpt2-gelu-tanh", "bert", "roberta",
    "distilbert", "modernbert", "vit", "opt",
)  # fmt: skip
MODES = ("fp32", "bf16", "autocast")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "autocast": torch.float32}
every_family = pytest.mark.parametrize("name", NAMES)


def by_plans(preset: str) -> CompressionConfig:
    """A preset with stock's head, whose layers run by plans."""
    return replace(PRESETS[preset], loss_head=False)


def plans_of(model: nn.Module, role: Role = Role.LAYER) -> list[PlannedLayer]:
    """The plans of each layer; or of each module outside of layers."""
    found = [settings_of(module) for module in model.modules()]
    return [settings.plans for settings in found if isinstance(settings, LayerSettings) and settings.role == role]


def pair(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    """A stock model, and one with the same weights that runs by plans."""
    model = BY_NAME[name].build(dtype, **options)
    return model, patch_model(copy.deepcopy(model), PLANS)


def patched(model: Any, config: CompressionConfig | None) -> Any:
    """The model, patched with a config; None: left as it is."""
    return model if config is None else patch_model(model, config)


def calls(model: nn.Module) -> list[int]:
    """How often each layer has run by plans."""
    return [plans.calls for plans in plans_of(model)]


def assert_same(model: Any, other: Any, batch: Batch, mode: str = "fp32") -> None:
    """The models have the same bits in the loss and in every gradient."""
    (loss, grads), (other_loss, other_grads) = step(model, batch, mode), step(other, batch, mode)
    assert torch.equal(loss, other_loss) and grads.keys() == other_grads.keys()
    assert not [name for name, x in other_grads.items() if not torch.equal(grads[name], x)]


def assert_all_ran(model: nn.Module) -> None:
    """No call of a layer went leaf by leaf, nor one of a module outside of layers."""
    assert plans_of(model)
    # where layers are checkpointed, transformers puts a hook on the embedding
    hooked = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    reasons = {plans.why for plans in plans_of(model, Role.MODULE)}
    assert reasons <= {"", *["a module in it has hooks or a forward of its own"] * hooked}
    assert [(plans.calls > 0, plans.why) for plans in plans_of(model)] == [(True, "")] * len(plans_of(model))


def assert_compiled(model: Any) -> None:
    """All plans of the model ran compiled."""
    for plans in plans_of(model):
        assert plans.why_not_compiled() == []
        assert [known for known in plans.known() if known.plan.compiled]


def kept_bytes(model: Any, batch: dict[str, Any]) -> int:
    """What a step keeps until backward, by allocator events."""
    return kept_by(lambda: model(**batch).loss)


def assert_stock_bits(model: Any, batch: Batch, mode: str = "fp32", config: CompressionConfig = PLANS) -> Any:
    """A step of the model by plans has stock's bits in the loss and in every gradient. Returns the patched model."""
    ours = patch_model(copy.deepcopy(model), config)
    assert_same(ours, model, batch, mode)
    assert_all_ran(ours)
    return ours
