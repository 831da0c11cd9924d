"""Pairs of models with the same weights: stock, and one whose layers run by plans under stock's head."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.layers.site import PlannedLayerMixin
from tests.families import BY_NAME, Batch, step

LEAVES = CompressionConfig(plans=False, loss_head=False)
PLANS = CompressionConfig(loss_head=False)
NAMES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "gpt2-gelu-new", "gpt2-gelu-tanh", "bert", "roberta",
    "distilbert", "modernbert", "vit", "opt",
)  # fmt: skip
MODES = ("fp32", "bf16", "autocast")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "autocast": torch.float32}
every_family = pytest.mark.parametrize("name", NAMES)


def pair(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    """A stock model, and one with the same weights that runs by plans."""
    model = BY_NAME[name].build(dtype, **options)
    return model, patch_model(copy.deepcopy(model), PLANS)


def patched(model: Any, config: CompressionConfig | None) -> Any:
    """The model, patched with a config; None: left as it is."""
    return model if config is None else patch_model(model, config)


def calls(model: nn.Module) -> list[int]:
    """How often each layer has run by plans."""
    return [layer.actcompress.plans.calls for layer in model.modules() if isinstance(layer, PlannedLayerMixin)]  # type: ignore[union-attr]


def assert_same(model: Any, other: Any, batch: Batch, mode: str = "fp32") -> None:
    """The models have the same bits in the loss and in every gradient."""
    (loss, grads), (other_loss, other_grads) = step(model, batch, mode), step(other, batch, mode)
    assert torch.equal(loss, other_loss) and grads.keys() == other_grads.keys()
    assert not [name for name, x in other_grads.items() if not torch.equal(grads[name], x)]
