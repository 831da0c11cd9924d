"""Pairs of models with the same weights: one runs module by module, the other as programs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hf_actcompress import CompressionConfig, patch_model, unpatch_model
from hf_actcompress.programs.layer import ProgramLayerMixin
from tests.families import BY_NAME, Batch, step

LEAVES = CompressionConfig(programs=False)
PROGRAMS = CompressionConfig(programs=True)
NAMES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "gpt2-gelu-new", "gpt2-gelu-tanh", "bert", "roberta",
    "distilbert", "modernbert", "vit", "opt",
)  # fmt: skip
MODES = ("fp32", "bf16", "autocast")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "autocast": torch.float32}
every_family = pytest.mark.parametrize("name", NAMES)


def pair(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    """Two models with the same weights: the first runs module by module, the second as programs."""
    model = BY_NAME[name].build(dtype, **options)
    return patch_model(model, LEAVES), patch_model(copy.deepcopy(unpatch_model(copy.deepcopy(model))), PROGRAMS)


def calls(model: nn.Module) -> list[int]:
    """How often each layer has run as programs."""
    return [layer.actcompress.programs.calls for layer in model.modules() if isinstance(layer, ProgramLayerMixin)]  # type: ignore[union-attr]


def assert_same(model: Any, other: Any, batch: Batch, mode: str = "fp32") -> None:
    (loss, grads), (other_loss, other_grads) = step(model, batch, mode), step(other, batch, mode)
    assert torch.equal(loss, other_loss) and grads.keys() == other_grads.keys()
    assert all(torch.equal(grads[name], x) for name, x in other_grads.items())
