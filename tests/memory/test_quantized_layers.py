"""Which layers an estimate takes as packed: those that transformers packs, and for GPT-2 bytes as with bitsandbytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from hf_actcompress import estimate
from hf_actcompress.errors import ModelConfigError
from hf_actcompress.memory.estimation.meta_model import skeleton
from hf_actcompress.memory.estimation.quantized.model import QuantizedLinear
from tests.cli.invoke import run
from tests.memory.test_quantized import SIZES, as_measured

SMALL: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": 500, "n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 128, "use_cache": False,
    "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16", "architectures": ["GPT2LMHeadModel"],
}  # fmt: skip
T5: dict[str, Any] = {"vocab_size": 500, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
MODELS: dict[str, tuple[Any, Any]] = {
    "GPT-2": (hf.GPT2LMHeadModel, hf.GPT2Config(**GPT2)),
    "GPT-2, classification": (hf.GPT2ForSequenceClassification, hf.GPT2Config(**GPT2)),
    "Llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**SMALL)),
    "Llama, tied": (hf.LlamaForCausalLM, hf.LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "BERT": (hf.BertForMaskedLM, hf.BertConfig(**SMALL)),
    "BERT, classification": (hf.BertForSequenceClassification, hf.BertConfig(**SMALL)),
    "T5": (hf.T5ForConditionalGeneration, hf.T5Config(**T5)),
    "Falcon": (hf.FalconForCausalLM, hf.FalconConfig(**SMALL)),
    "Mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig(**SMALL, num_local_experts=4, num_key_value_heads=2)),
}  # fmt: skip
SKIPPED = (None, [], ["lm_head", "layers.1", r".*\.c_proj"])
OPTIONS: dict[str, dict[str, Any]] = {
    "nf4": {
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.bfloat16,
    },
    "int8": {"load_in_8bit": True},
}  # fmt: skip


def packed(cls: Any, config: Any, quantization: Any) -> set[str]:
    """Paths of the layers that the estimate takes as packed."""
    config.architectures = [cls.__name__]
    model = skeleton(config, torch.bfloat16, None, False, quantization)
    return {path for path, module in model.named_modules() if isinstance(module, QuantizedLinear)}


@pytest.mark.parametrize("skipped", SKIPPED, ids=["default", "nothing", "some"])
@pytest.mark.parametrize("name", MODELS)
def test_bitsandbytes_packs_the_same_layers(name: str, skipped: list[str] | None) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    cls, config = MODELS[name]
    asked = hf.BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=skipped)
    with torch.device("meta"):
        real = cls(config)
    Bnb4BitHfQuantizer(asked, pre_quantized=False)._process_model_before_weight_loading(real, device_map=None)
    expected = {path for path, module in real.named_modules() if isinstance(module, bnb.nn.Linear4bit)}
    if expected:
        assert packed(cls, config, asked) == expected
    else:
        # all linear layers of its blocks are of a class of its own
        assert name == "Falcon"
        with pytest.raises(ModelConfigError, match="bitsandbytes packs no layer of FalconForCausalLM"):
            packed(cls, config, asked)


def layers_of(kind: type[nn.Module], cls: Any, config: Any) -> set[str]:
    with torch.device("meta"):
        return {path for path, module in cls(config).named_modules() if isinstance(module, kind)}


@pytest.mark.parametrize("method", ["awq", "torchao"])
def test_what_packs_subclasses_of_linear_layers_and_not_those_of_gpt2(method: str) -> None:
    """Their integrations look for `nn.Linear`, which GPT-2's layers are not and Falcon's are."""
    options: dict[str, Any] = {"quant_method": method, "quant_type": "int8_weight_only"}
    with pytest.raises(ModelConfigError, match=f"{method} packs no layer of GPT2LMHeadModel"):
        packed(*MODELS["GPT-2"], options)
    falcon = MODELS["Falcon"]
    assert packed(*falcon, options) == layers_of(nn.Linear, *falcon) - {"lm_head"}


def test_modules_that_are_not_to_be_converted() -> None:
    """AWQ leaves the head alone whatever is stated; torchao compares the names of weights, and only whole ones."""
    llama = MODELS["Llama"]
    every = layers_of(nn.Linear, *llama)
    stated = {"modules_to_not_convert": ["model.layers.0", "k_proj"], "quant_type": "int8_weight_only"}
    of_first = {path for path in every if path.startswith("model.layers.0.")}
    of_keys = {path for path in every if path.endswith("k_proj")}
    assert packed(*llama, {**stated, "quant_method": "awq"}) == every - of_first - of_keys - {"lm_head"}
    assert packed(*llama, {**stated, "quant_method": "torchao"}) == every - of_first


def test_gptq_packs_layers_of_blocks() -> None:
    gptq = {"quant_method": "gptq", "bits": 4}
    gpt2, llama = MODELS["GPT-2"], MODELS["Llama"]
    assert packed(*gpt2, gptq) == packed(*gpt2, "nf4") != set()
    assert packed(*llama, gptq) == layers_of(nn.Linear, *llama) - {"lm_head"}
    some = packed(*llama, {**gptq, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]})
    assert some == {f"model.layers.{i}.{name}" for i in range(2) for name in ("self_attn.q_proj", "mlp.up_proj")}
    assert packed(*llama, {**gptq, "block_name_to_quantize": "model.layers.1"}) == {
        path for path in layers_of(nn.Linear, *llama) if path.startswith("model.layers.1.")
    }


def test_what_stays_unpacked_is_said() -> None:
    """Most of Mixtral's weights are experts, each layer's one parameter; most of this Llama's are in linear layers."""
    options: dict[str, Any] = {"batch_size": 1, "seq_len": 16, "config": "stock", "lora": 4, "quantization": "nf4"}
    wide = {**SMALL, "hidden_size": 256, "num_key_value_heads": 2}
    mixtral, llama = hf.MixtralConfig(**wide, num_local_experts=8), hf.LlamaConfig(**wide, tie_word_embeddings=True)
    found = estimate(mixtral, **options)
    kept = 2 * (8 * 3 * 256 * 128 + 8 * 256 + 2 * 256) + 2 * 500 * 256 + 256
    share = (packed := 2 * 3 * 256 * 256) / (packed + kept)
    assert found.notes == (f"only {share:.0%} of the frozen weights are packed; of the others MixtralExperts has most",)
    assert not estimate(llama, **options).notes


def loaded(kind: str, folder: Path) -> Any:
    """GPT-2 as `from_pretrained` loads it, and adapters on all linear layers."""
    import peft

    torch.manual_seed(0)
    hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)).bfloat16().save_pretrained(folder)
    asked = hf.BitsAndBytesConfig(**OPTIONS[kind])
    model = hf.GPT2LMHeadModel.from_pretrained(folder, quantization_config=asked, dtype=torch.bfloat16)
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear")).train()


@pytest.mark.parametrize("kind", OPTIONS)
def test_gpt2_with_bitsandbytes(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    for config in ("stock", "exact", "int8"):
        found = as_measured(loaded(kind, tmp_path), config)
        alone = estimate(hf.GPT2Config(**GPT2), **SIZES, config=config, device="cpu", quantization=kind, lora=8)
        assert alone.kept_bytes == found.kept_bytes and alone.step_peak_bytes == found.step_peak_bytes
        assert alone.weights_bytes == found.weights_bytes


def test_several_processes_with_packed_weights_of_gpt2(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**GPT2, "model_type": "gpt2"}))
    result = run("estimate", str(path), "--seq-len", "64", "--preset", "exact", "--qlora", "--fsdp", "8", "--no-cache")
    assert result.exit_code == 3 and "not made for quantised weights" in result.output
