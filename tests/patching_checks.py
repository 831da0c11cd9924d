"""Helpers for the tests of patch_model: module types, whether a model is patched, and whether it trains like stock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_actcompress.modules.base import PatchedModule
from tests.families import BY_NAME, Batch, differing, step

BERT, GPT2, LLAMA = BY_NAME["bert"], BY_NAME["gpt2-gelu-tanh"], BY_NAME["llama"]
three = pytest.mark.parametrize("family", [BERT, GPT2, LLAMA], ids=lambda f: f.name)
BF16 = torch.bfloat16


def types_of(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


def is_patched(model: nn.Module) -> bool:
    return any(isinstance(m, PatchedModule) for m in model.modules())


def assert_trains_like(model: Any, reference: Any, batch: Batch) -> None:
    loss, grads = step(model, batch)
    stock_loss, stock = step(reference, batch)
    assert torch.equal(loss, stock_loss)
    assert not differing(grads, stock)
