"""Plans that set something for the whole model: MLPs in tiles."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers as hf

from hf_actcompress.memory import Plan, estimate, plan
from hf_actcompress.memory.planning.options import OPTIONS
from tests.memory.planned_steps import peak_with

# the MLPs are most of a layer
SIZES: dict[str, Any] = {"batch_size": 2, "seq_len": 640}
WITHOUT_HOST = tuple(name for name in OPTIONS if "offload" not in name)


@lru_cache
def model() -> Any:
    config = hf.LlamaConfig(
        vocab_size=8192, hidden_size=64, num_hidden_layers=4, num_attention_heads=1, intermediate_size=1024,
        pad_token_id=0, use_cache=False,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config).train()


@lru_cache
def needed(config: str) -> int:
    return estimate(model(), **SIZES, config=config, device="cpu").device_bytes


def planned(budget: int, **options: Any) -> Plan:
    return plan(model(), **SIZES, budget=budget, headroom=0.0, device="cpu", **options)


def stays_below(found: Plan, budget: int) -> None:
    """The step of the patched model on the allocator, with the states of the estimate."""
    peak = peak_with(found, model(), torch.randint(3, 128, (2, 640)))
    assert found.estimate.state_bytes + peak <= budget


def test_where_exact_fits_nothing_is_set_for_the_whole_model():
    found = planned(needed("exact"))
    assert found.preset == "exact" and not found.config.always_in_tiles


def test_a_budget_of_the_preset_long_has_a_plan_that_is_no_slower():
    """What the table of `estimate` lists, `plan` finds; by its name where all layers are alike."""
    budget = needed("long")
    found = planned(budget, allow=("tiles",))
    assert found.preset == "long" and found.config.lossless
    assert 0 < found.time < 0.5 and "MLPs are computed in tiles" in str(found)
    stays_below(found, budget)
    assert planned(budget, allow=WITHOUT_HOST).time <= found.time


def test_a_plan_of_one_kind_is_taken_where_another_one_is_hardly_faster():
    """With offloading that costs a little less time than tiles."""
    budget = needed("long")
    alone = planned(budget, allow=("tiles",))
    both = planned(budget)
    assert both.preset == "long" or both.time < alone.time - 0.05


def test_where_nothing_fits_the_message_counts_with_tiles():
    with pytest.raises(ValueError, match="the smallest plan") as least:
        planned(1, allow=("checkpoint",))
    with pytest.raises(ValueError, match="the smallest plan") as tiled:
        planned(1, allow=("checkpoint", "tiles"))
    assert tiled.value.missing_bytes < least.value.missing_bytes
