"""The cases on which the formula is compared, and the configs that it refuses: for Python and for the page."""

from __future__ import annotations

import json
from typing import Any

from hf_actcompress.quick import formula
from hf_actcompress.quick.question import question
from tests.quick.reference import FILE, MODES, PRESETS

CASES: list[dict[str, Any]] = json.loads(FILE.read_text())
# how far the formula may be from the estimate
WITHIN = 0.03
LLAMA = PRESETS["Llama-3.2-1B"]
ROBERTA = PRESETS["RoBERTa base (classification)"]

REFUSED = {
    "class": ({"architectures": ["OtherForCausalLM"]}, {}, "no formula for OtherForCausalLM; known: "),
    "nothing": ({}, {}, "no formula for a config without"),
    "structure": ({**LLAMA, "attention_bias": True}, {}, "attention_bias"),
    "type": ({**LLAMA, "model_type": "nope"}, {}, "model_type"),
    "padding": ({**LLAMA, "pad_token_id": 999_999}, {}, "LlamaForCausalLM cannot be made from this config: Padding"),
    "padding beyond the positions": ({**ROBERTA, "pad_token_id": 600}, {}, "Padding_idx must be within"),
    "no padding for positions": ({**ROBERTA, "pad_token_id": None}, {}, "pad_token_id is"),
    "padding in the last position": ({**ROBERTA, "pad_token_id": -1}, {}, "positions for 0 tokens, and 128 were"),
    "late padding": ({**ROBERTA, "pad_token_id": 400}, {}, "positions for 113 tokens, and 128 were"),
    "no width of the MLP": ({**LLAMA, "intermediate_size": None}, {}, "intermediate_size"),
    "quantised": ({**LLAMA, "quantization_config": {"bits": 4}}, {}, "QLoRA"),
    "heads": ({**LLAMA, "num_key_value_heads": 7}, {}, "7 in this config, and should be a divisor of num_att"),
    "one head of keys": ({**LLAMA, "num_key_value_heads": 1}, {}, "several heads of keys"),
    "a width as text": ({**LLAMA, "intermediate_size": "8192"}, {}, "intermediate_size"),
    "a negative head": ({**LLAMA, "head_dim": -64}, {}, "head_dim"),
    "sizes": ({**LLAMA, "num_hidden_layers": 0}, {}, "num_hidden_layers"),
    "dtype": (LLAMA, {"dtype": "float32", "lora": True}, "no formula for weights in float32"),
    "long dtype": (LLAMA, {"dtype": "float64"}, "no formula for weights in float64"),
    "fp4": (LLAMA, {"quantization": "fp4", "lora": True}, "nf4"),
    "experts": ({**PRESETS["Mixtral-8x7B"], "num_local_experts": 0}, {}, "num_local_experts"),
    "dense layers": ({**PRESETS["Qwen3-30B-A3B"], "mlp_only_layers": [0]}, {}, "mlp_only_layers"),
    "layer types": ({**PRESETS["Gemma-3-4B"], "layer_types": ["full_attention"] * 34}, {}, "full attention in each 6"),
    "head": ({**PRESETS["GPT-2"], "n_head": 6}, {"dtype": "bf16"}, "heads of 64"),
    "positions": ({**PRESETS["GPT-2"], "n_positions": 64}, {"dtype": "bf16"}, "learned positions"),
    "reserved positions": ({**ROBERTA, "max_position_embeddings": 129}, {}, "127 tok"),
    "experts of a token": (
        {**PRESETS["Mixtral-8x7B"], "num_experts_per_tok": 20},
        {},
        "more and at most num_local_exp",
    ),
    "a share": ({**LLAMA, "attention_dropout": 3}, {}, "should be a number from 0 to 1: correct it there"),
    "one of a list": ({**LLAMA, "image_size": [32, 0]}, {}, "in this config, and should be a whole number from 1"),
    "a name": ({**LLAMA, "architectures": "Llama"}, {}, "should be a list of names"),
    "a dtype": ({**LLAMA, "dtype": "bf17"}, {}, "one of float32, bfloat16, float16, float64, fp32"),
    "bits": ({**LLAMA, "quantization_config": {"bits": "four"}}, {}, "one of 2, 3, 4, 8"),
    "a group": ({**LLAMA, "quantization_config": {"group_size": 0}}, {}, "from 1 to 2147483647 or -1"),
    "no object": ({**LLAMA, "quantization_config": "nf4"}, {}, "an object with options"),
    "a width": ({**LLAMA, "hidden_size": 2049}, {}, "for a width that 32 heads divide, not for 2049"),
    "odd heads": ({**LLAMA, "head_dim": 33}, {}, "heads of 33 here"),
    "odd experts": ({**PRESETS["Mixtral-8x7B"], "intermediate_size": 100}, {}, "multiples of 8, not 4096 and 100"),
    "a null head": ({**PRESETS["Qwen3-8B"], "head_dim": None}, {}, "head_dim above 0"),
    "no window": ({**PRESETS["Gemma-3-4B"], "sliding_window": None}, {}, "needs a sliding_window"),
    "no padding token": ({**ROBERTA, "pad_token_id": None}, {}, "state the padding token there"),
    "window": ({**PRESETS["Mixtral-8x7B"], "sliding_window": 128}, {}, "tokens back"),
}


def named(case: dict[str, Any]) -> str:
    return f"{case['model']}-{case['mode']}-{case['strategy']}"


def answered(case: dict[str, Any]) -> formula.QuickEstimate:
    asked = question(PRESETS[case["model"]], **MODES[case["mode"]])
    return asked.answer(case["strategy"], case["batch_size"], case["seq_len"], case["optimizer"])
