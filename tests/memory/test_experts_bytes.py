"""Mixtures of experts in the proportions of real models: bytes per token and layer in units of the hidden size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import transformers as hf

from hf_actcompress import patch_model
from tests.slopes import VOCAB, slope

pytestmark = pytest.mark.daily(3)


def qwen3_30b(layers: int) -> Any:
    """Qwen3-30B-A3B at half its width. The number of experts, here fewer, does not change what is kept."""
    return hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(
            vocab_size=VOCAB, hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16, head_dim=128,
            num_key_value_heads=2, intermediate_size=1024, moe_intermediate_size=384, num_experts=16,
            num_experts_per_tok=8, use_cache=False,
        )
    )  # fmt: skip


def mixtral(layers: int) -> Any:
    """Mixtral-8x7B at a quarter of its width, with half of its experts."""
    return hf.MixtralForCausalLM(
        hf.MixtralConfig(
            vocab_size=VOCAB, hidden_size=1024, num_hidden_layers=layers, num_attention_heads=8,
            num_key_value_heads=2, intermediate_size=3584, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
        )
    )  # fmt: skip


# limits in bytes, with two bytes per element; the least that `exact` can keep is 12.5 and 18.5 tensors of the hidden
# states' size
LIMITS = [(qwen3_30b, 90, 27, 16.5), (mixtral, 80, 38.5, 21)]


@pytest.mark.parametrize(("build", "stock", "exact", "int8"), LIMITS, ids=lambda x: getattr(x, "__name__", None))
def test_kept(build: Callable[[int], Any], stock: float, exact: float, int8: float) -> None:
    kept = {p: slope(build, prepare=lambda model, p=p: patch_model(model, p)).kept for p in ("exact", "int8")}
    kept["stock"] = slope(build).kept
    print(build.__name__, kept)
    assert kept["stock"] >= stock and kept["exact"] <= exact and kept["int8"] <= int8
