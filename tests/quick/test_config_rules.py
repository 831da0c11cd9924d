"""The table of what a config may hold: what it refuses, in which words, and that it refuses no config that is used."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from hf_actcompress.errors import ActCompressError, ModelConfigError
from hf_actcompress.memory.estimation.estimates import Estimates
from hf_actcompress.quick.config_rules import check_config
from hf_actcompress.quick.question import classes, question
from tests.quick.reference import PRESETS

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 101, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "bert": {"model_type": "bert", "num_attention_heads": 4, "hidden_size": 32, "hidden_dropout_prob": 0.1},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "attn_pdrop": 0.1},
    "t5": {"model_type": "t5", "d_model": 32, "d_kv": 8, "num_heads": 4, "decoder_start_token_id": 0, "vocab_size": 99},
    "mixtral": {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {**LLAMA, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2},
    "vit": {"model_type": "vit", "image_size": 32, "patch_size": 8, "num_channels": 3},
    "llava": {"model_type": "llava", "text_config": LLAMA, "vision_config": {"image_size": 16, "num_hidden_layers": 2}},
    "whisper": {"model_type": "whisper", "d_model": 32, "encoder_layers": 2, "decoder_attention_heads": 4,
                "encoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 32, "encoder_layerdrop": 0.0},
    "mamba": {"model_type": "mamba", "state_size": 4, "expand": 2, "conv_kernel": 4, "time_step_rank": "auto"},
}  # fmt: skip
COUNTED = "a whole number from 1 to"
BROKEN = (
    ("llama", "num_key_value_heads", 3, "a divisor of num_attention_heads (4)"),
    ("llama", "num_key_value_heads", 0, COUNTED),
    ("llama", "vocab_size", 0, COUNTED),
    ("llama", "intermediate_size", 0, COUNTED),
    ("llama", "intermediate_size", "48", COUNTED),
    ("llama", "intermediate_size", True, COUNTED),
    ("llama", "hidden_size", 32.5, COUNTED),
    ("llama", "hidden_size", float("nan"), COUNTED),
    ("llama", "hidden_size", float("inf"), COUNTED),
    ("llama", "hidden_size", 10**30, COUNTED),
    ("llama", "num_hidden_layers", -1, "a whole number from 1 to 4096"),
    ("llama", "num_hidden_layers", 10**6, "a whole number from 1 to 4096"),
    ("llama", "max_position_embeddings", -1, COUNTED),
    ("llama", "attention_dropout", 3, "a number from 0 to 1"),
    ("llama", "attention_dropout", -1, "a number from 0 to 1"),
    ("llama", "rms_norm_eps", -1e-6, "a number of 0 or more"),
    ("llama", "rope_theta", 0, "a number of 1 or more"),
    ("llama", "dtype", "bf17", "one of float32, bfloat16"),
    ("llama", "torch_dtype", {}, "one of float32, bfloat16"),
    ("llama", "architectures", "LlamaForCausalLM", "a list of names"),
    ("llama", "architectures", [3], "a list of names"),
    ("llama", "quantization_config", "nf4", "an object with options"),
    ("llama", "quantization_config.bits", "four", "one of 2, 3, 4, 8"),
    ("llama", "quantization_config.group_size", 0, f"{COUNTED} 2147483647 or -1"),
    ("llama", "quantization_config.bnb_4bit_quant_type", "nf5", "one of nf4, fp4"),
    ("bert", "hidden_dropout_prob", 1.5, "a number from 0 to 1"),
    ("bert", "type_vocab_size", -1, "a whole number from 0"),
    ("gpt2", "n_layer", 0, COUNTED),
    ("gpt2", "pad_token_id", "four", "a whole number"),
    ("gpt2", "eos_token_id", [1, 2.5], "a whole number"),
    ("gpt2", "n_inner", 0, COUNTED),
    ("gpt2", "resid_pdrop", -0.1, "a number from 0 to 1"),
    ("t5", "num_heads", 0, COUNTED),
    ("t5", "num_decoder_layers", -1, COUNTED),
    ("t5", "decoder_start_token_id", 99, "a whole number of 0 or more and below vocab_size (99)"),
    ("mixtral", "num_experts_per_tok", 20, "a whole number of 1 or more and at most num_local_experts (8)"),
    ("mixtral", "num_experts_per_tok", 0, "at most num_local_experts (8)"),
    ("mixtral", "sliding_window", 0, COUNTED),
    ("mixtral", "sliding_window", [1], COUNTED),
    ("qwen3_moe", "num_experts_per_tok", 9, "at most num_experts (8)"),
    ("qwen3_moe", "moe_intermediate_size", 0, COUNTED),
    ("vit", "image_size", -1, COUNTED),
    ("vit", "image_size", [32, 0], COUNTED),
    ("vit", "num_channels", 0, COUNTED),
    ("llava", "text_config.num_key_value_heads", 3, "a divisor of num_attention_heads (4)"),
    ("llava", "vision_config.patch_size", 0, COUNTED),
    ("llava", "vision_config.attention_dropout", 3, "a number from 0 to 1"),
    ("whisper", "encoder_layers", 0, COUNTED),
    ("whisper", "decoder_layerdrop", 2, "a number from 0 to 1"),
    ("whisper", "max_target_positions", -5, COUNTED),
    ("mamba", "state_size", 0, COUNTED),
    ("mamba", "time_step_rank", "none", f"{COUNTED} 2147483647 or 'auto'"),
)


def changed(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    found = copy.deepcopy(config)
    *above, field = path.split(".")
    part = found
    for name in above:
        part = part.setdefault(name, {})
    part[field] = value
    return found


@pytest.mark.parametrize(("family", "field", "value", "should"), BROKEN, ids=lambda value: str(value)[:30])
def test_a_broken_field_is_named_with_what_it_should_be(family: str, field: str, value: Any, should: str) -> None:
    check_config(FAMILIES[family])
    with pytest.raises(ModelConfigError) as raised:
        check_config(changed(FAMILIES[family], field, value))
    said = str(raised.value)
    assert said.startswith(f"{field} is {value!r} in this config, and should be ") and should in said
    assert said.endswith(": correct it there") and "\n" not in said


def test_what_is_null_or_not_used_is_no_fault() -> None:
    for field, value in (
        ("num_key_value_heads", None),
        ("attention_dropout", True),
        ("image_size", [32, [16]]),
        ("num_hidden_layers", {"vision": 5, "language": 9}),
        ("id2label", {0: "no"}),
        ("torch_dtype", "torch.bfloat16"),
    ):
        check_config(changed(LLAMA, field, value))
    check_config({**LLAMA, "sliding_window": 0, "use_sliding_window": False})
    # a dense model of a class for mixtures
    check_config({**LLAMA, "num_local_experts": 0, "num_experts_per_tok": 0})


def test_models_that_are_used_break_no_rule() -> None:
    for config in PRESETS.values():
        check_config(config)


@pytest.mark.daily(8)
@pytest.mark.parametrize("part", range(8))
def test_the_defaults_of_transformers_break_no_rule(part: int) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for name in sorted(CONFIG_MAPPING)[part::8]:
        try:
            config = CONFIG_MAPPING[name]().to_dict()
        except Exception:  # of any class's checks: it has no defaults
            continue
        check_config(config)


# values of any field, of which the whole estimate refuses some that the formula has to refuse, too
ODD = (0, -1, 3, "four", None, 2.5, [1], {}, 6, 250)
SIZES = {"layers": 2, "hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 512, "vocab": 300, "positions": 64, "head": 64,
         "experts": 4, "active": 2}  # fmt: skip


@pytest.mark.daily(15)
@pytest.mark.parametrize("name", classes())
def test_the_formula_refuses_what_the_whole_estimate_refuses(name: str, tmp_path: Any) -> None:
    data, path = classes()[name], tmp_path / "config.json"
    config = {"architectures": [name], "model_type": data["model_type"], "dtype": "bfloat16"}
    config |= {field: SIZES[size] for size, field in data["fields"].items()}
    for field in (*data["fields"].values(), "sliding_window", "dtype", "pad_token_id"):
        for value in ODD:
            broken = {**config, field: value}
            path.write_text(json.dumps(broken))
            try:
                Estimates(str(path)).estimate(2, 16, None)
            except ActCompressError as error:
                assert "\n" not in str(error), (field, value)
                with pytest.raises(ActCompressError):
                    question(broken).answer("stock", 2, 16)
