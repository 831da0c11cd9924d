"""How many layers run by plans in a step, by family and by kind of training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_actcompress import patch_model
from tests.layers.plans import PLANS
from tests.layers.test_layer_types import PICTURES, SMALL

T5 = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8, "decoder_start_token_id": 0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {}, "qwen2": {}, "qwen3": {"head_dim": 8}, "phi3": {"bos_token_id": 1, "eos_token_id": 2},
    "gemma": {"head_dim": 8}, "gemma2": {"head_dim": 8}, "gemma3_text": {"head_dim": 8}, "olmo2": {},
    "granite": {"residual_multiplier": 0.3}, "cohere": {}, "gpt_neox": {}, "gpt2": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32}, "vit": PICTURES, "bert": {}, "roberta": {},
    "distilbert": {"hidden_dim": 64}, "modernbert": {}, "t5": T5, "falcon": {},
    "bloom": {}, "gptj": {"rotary_dim": 4}, "codegen": {"rotary_dim": 4},
}  # fmt: skip
STACKS = ("defaults", "padding", "autocast", "lora", "lora with dropout")


def build(name: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return AutoModel.from_config(AutoConfig.for_model(name, **{**SMALL, **options})).train()


def make_batch(name: str, padding: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if FAMILIES.get(name) is PICTURES:
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    ids = torch.randint(3, 90, (2, 9), generator=generator)
    batch = {"input_ids": ids}
    if padding:
        batch["attention_mask"] = (torch.arange(9) < torch.tensor([[9], [6]])).long()
    if name == "t5":
        batch["decoder_input_ids"] = ids[:, :5]
    return batch


def layers_of(model: nn.Module) -> list[Any]:
    return [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]


def ran(model: nn.Module) -> list[int]:
    """How often each layer has run by plans."""
    return [
        settings.plans.calls if (settings := getattr(layer, "actcompress", None)) else 0 for layer in layers_of(model)
    ]


def share(model: Any, name: str, stack: str) -> float:
    """The share of layers that run by plans in a step."""
    before = ran(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=stack == "autocast"):
        hidden = model(**make_batch(name, stack != "defaults")).last_hidden_state
    hidden.float().square().mean().backward()
    counts = [after - count for after, count in zip(ran(model), before, strict=True)]
    return sum(count > 0 for count in counts) / len(counts)


@pytest.mark.parametrize("name", FAMILIES)
def test_nine_in_ten_layers_run_by_plans(name: str) -> None:
    model = patch_model(build(name, FAMILIES[name]), PLANS)
    assert {stack: share(model, name, stack) for stack in STACKS[:3]} == dict.fromkeys(STACKS[:3], 1.0)


@pytest.mark.daily(4)
@pytest.mark.parametrize("stack", STACKS[3:])
@pytest.mark.parametrize("name", FAMILIES)
def test_with_adapters(name: str, stack: str) -> None:
    peft = pytest.importorskip("peft")
    rate = 0.1 if "dropout" in stack else 0.0
    config = peft.LoraConfig(target_modules="all-linear", r=4, lora_dropout=rate)
    model = patch_model(peft.get_peft_model(build(name, FAMILIES[name]), config), PLANS)
    assert share(model, name, stack) == 1.0
