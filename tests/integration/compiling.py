"""Compiled models for the tests of torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_actcompress import kept_bytes
from tests.families import Family

BACKEND = "hf_actcompress"


def build(family: Family, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    model = family.build(dtype, **options)
    if family.name.startswith("gpt2"):
        # without a loss type transformers logs a warning, which cannot be traced
        model.loss_type = "ForCausalLM"
    return model


def one_graph(model: nn.Module, backend: str = BACKEND) -> Any:
    return torch.compile(model, fullgraph=True, backend=backend)


def kept_by(model: Any, batch: dict[str, Any]) -> int:
    """Bytes that one forward keeps, once it is compiled."""
    model(**batch)
    return kept_bytes(lambda: model(**batch), "cpu")
