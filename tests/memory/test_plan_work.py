"""The arithmetic that a plan counts with: by weights of a layer, as a paper would count it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from hf_actcompress.memory import plan
from hf_actcompress.memory.estimation.fake_step.arithmetic import Work
from hf_actcompress.memory.estimation.fake_step.setting import Setting
from hf_actcompress.memory.estimation.fake_step.step import run_counted
from hf_actcompress.memory.estimation.meta_model import skeleton
from hf_actcompress.memory.planning.options import measure

B, S, RANK = 2, 32, 4
T = B * S
SIZES: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96,
}  # fmt: skip
GPT2 = hf.GPT2Config(
    vocab_size=500, n_embd=64, n_layer=3, n_head=4, n_inner=96, attn_pdrop=0, architectures=["GPT2LMHeadModel"]
)
# torch's count of the fused kernel's backward, which computes the probabilities again: five products for two
ATTENTION_BACKWARD = 2.5


def layer(config: Any, lora: int | None = None, quantization: str | None = None, cuda: bool = True) -> Work:
    model = skeleton(config, torch.bfloat16, lora, False, quantization)
    layers = measure(model, lambda part: run_counted(part, Setting(B, S, None, cuda))).layers
    return layers[next(run for run in layers if "vision" not in run.name)]


def linear(*shapes: tuple[int, int]) -> int:
    """Operations of a forward with these weights."""
    return 2 * T * sum(rows * columns for rows, columns in shapes)


def adapters(*shapes: tuple[int, int]) -> int:
    return 2 * T * RANK * sum(rows + columns for rows, columns in shapes)


LLAMA = ((64, 64), (32, 64), (32, 64), (64, 64), (96, 64), (96, 64), (64, 96))
OF_GPT2 = ((64, 192), (64, 64), (64, 96), (96, 64))
CONFIGS: dict[str, tuple[Any, tuple[tuple[int, int], ...]]] = {
    "Llama": (hf.LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]), LLAMA),
    "GPT-2": (GPT2, OF_GPT2),
}


@pytest.mark.parametrize("cuda", [True, False], ids=["cuda", "cpu"])
@pytest.mark.parametrize("name", CONFIGS)
def test_frozen_weights_have_half_a_backward_and_packed_ones_are_whole(name: str, cuda: bool) -> None:
    config, shapes = CONFIGS[name]
    attention = 4 * S * T * 64
    trained = layer(config, cuda=cuda)
    backward = 2 * linear(*shapes) + ATTENTION_BACKWARD * attention
    # the products of the MLP are those that tiles recompute
    assert trained == Work(linear(*shapes), attention, backward, linear(*shapes[-3 if name == "Llama" else -2 :]))
    products = linear(*shapes) + adapters(*shapes)
    backward = linear(*shapes) + 2 * adapters(*shapes) + ATTENTION_BACKWARD * attention
    mlp = shapes[-3 if name == "Llama" else -2 :]
    expected = Work(products, attention, backward, linear(*mlp) + adapters(*mlp))
    assert layer(config, RANK, cuda=cuda) == expected
    for packed in ("nf4", "int8"):
        assert layer(config, RANK, packed, cuda) == expected


@pytest.mark.parametrize("cuda", [True, False], ids=["cuda", "cpu"])
@pytest.mark.parametrize(("chosen", "count"), [(1, 4), (2, 8)])
def test_only_the_chosen_experts_compute(chosen: int, count: int, cuda: bool) -> None:
    options = {"num_local_experts": count, "num_experts_per_tok": chosen, "architectures": ["MixtralForCausalLM"]}
    products = linear(*LLAMA[:4], (count, 64)) + chosen * linear(*LLAMA[4:])
    found = layer(hf.MixtralConfig(**SIZES, **options), cuda=cuda)
    assert found.products == products
    assert found.backward == 2 * products + ATTENTION_BACKWARD * found.attention


def test_heads_that_are_not_as_wide_as_the_layer() -> None:
    found = layer(hf.Qwen3Config(**SIZES, head_dim=32, architectures=["Qwen3ForCausalLM"]))
    assert found.attention == 4 * S * T * 4 * 32


def test_a_model_whose_config_has_the_text_s_width_in_a_part() -> None:
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    clip = {"model_type": "clip_vision_model", "projection_dim": 32, "image_size": 28, "patch_size": 14, **tower}
    text = {"model_type": "llama", **SIZES, "vocab_size": 1000}
    found = layer(hf.LlavaConfig(text_config=text, vision_config=clip, image_token_id=999))
    assert found.products == linear(*LLAMA) and found.attention == 4 * S * T * 64


def test_a_plan_says_what_a_second_forward_costs_of_frozen_weights() -> None:
    """A third of the arithmetic if all weights are trained; about half of it if they are frozen."""
    config, shapes = CONFIGS["Llama"]
    options: dict[str, Any] = {
        "batch_size": B,
        "seq_len": S,
        "device": "cpu",
        "allow": ("checkpoint",),
        "dtype": "bf16",
    }
    times = []
    for more in ({}, {"lora": RANK}, {"lora": RANK, "quantization": "nf4"}):
        floor = plan(config, **options, **more, budget="1GiB").estimate.device_bytes
        found = plan(config, **options, **more, budget=floor - 1000, headroom=0.0)
        work = layer(config, more.get("lora"), more.get("quantization"), cuda=False)
        row = next(row for row in found.rows if row.option == "checkpoint")
        assert row.time == pytest.approx(work.forward / work.step)
        times.append(row.time)
    assert times[0] < 0.34 and 0.4 < times[1] == times[2] < 0.5
