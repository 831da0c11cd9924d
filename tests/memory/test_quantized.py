"""Estimates of QLoRA: weights of 4 and 8 bits, against bitsandbytes on a CPU, and from a config alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from hf_actcompress import estimate, kept_bytes, measure_step, patch_model
from hf_actcompress.errors import ModelConfigError
from hf_actcompress.memory import plan
from tests.cli.invoke import run

pytestmark = pytest.mark.daily(3)

SIZES = {"batch_size": 2, "seq_len": 96}
TINY = {
    "vocab_size": 500, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 256, "use_cache": False, "dtype": "bfloat16", "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "dtype": "bfloat16", "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
GIB = 2**30


def quantized(linear: nn.Linear, kind: str) -> nn.Module:
    """The layer of bitsandbytes with those weights."""
    import bitsandbytes as bnb

    shape = linear.in_features, linear.out_features
    if kind == "int8":
        layer = bnb.nn.Linear8bitLt(*shape, bias=False, has_fp16_weights=False)
        layer.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
    else:
        options = {"quant_type": kind, "compress_statistics": kind == "nf4"}
        layer = bnb.nn.Linear4bit(*shape, bias=False, compute_dtype=torch.bfloat16, **options)
        layer.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, module=layer, **options)
    moved: nn.Module = layer.to("cpu")
    return moved


def loaded(kind: str) -> Any:
    """As `from_pretrained` with a `quantization_config` loads it, and adapters on all linear layers."""
    import peft

    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**TINY)).bfloat16().requires_grad_(False)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "lm_head":
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, quantized(module, kind))
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear")).train()


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_a_loaded_model_and_its_config(kind: str) -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    ids = torch.randint(3, 500, (2, 96))
    for config in ("stock", "exact", "int8"):
        model = loaded(kind)
        found = estimate(model, **SIZES, config=config, device="cpu")
        if config != "stock":
            patch_model(model, config)
        model(input_ids=ids, labels=ids).loss.backward()
        kept = kept_bytes(lambda m=model: m(input_ids=ids, labels=ids).loss, "cpu")
        peak = measure_step(lambda m=model: m(input_ids=ids, labels=ids).loss.backward(), "cpu").peak_bytes
        print(kind, config, found.kept_bytes / kept, found.step_peak_bytes / peak)
        assert found.kept_bytes == pytest.approx(kept, rel=0.01)
        assert found.step_peak_bytes == pytest.approx(peak, rel=0.05)
        alone = estimate(hf.LlamaConfig(**TINY), **SIZES, config=config, device="cpu", quantization=kind, lora=8)
        assert alone.kept_bytes == found.kept_bytes
        weights = sum(p.nbytes for p in model.parameters())
        assert weights < found.weights_bytes < 1.15 * weights
        assert alone.weights_bytes == pytest.approx(found.weights_bytes, rel=0.01)


CONFIGS: dict[str, Any] = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
}


@pytest.mark.parametrize("method", CONFIGS)
def test_what_a_config_says(method: str) -> None:
    """Llama-3-8B in 4 bits: its layers in a quarter of 13 GiB, embeddings and head as they are."""
    pytest.importorskip("peft")
    plain = estimate(hf.LlamaConfig(**LLAMA_8B), batch_size=1, seq_len=64, lora=8)
    config = hf.LlamaConfig(**LLAMA_8B, quantization_config=CONFIGS[method])
    found = estimate(config, batch_size=1, seq_len=64, lora=8)
    assert 14.9 * GIB < plain.weights_bytes < 15.1 * GIB
    assert 5.2 * GIB < found.weights_bytes < 5.5 * GIB
    assert found.gradients_bytes == plain.gradients_bytes and found.optimizer_bytes == plain.optimizer_bytes


def test_an_unknown_method_is_said() -> None:
    config = hf.LlamaConfig(**TINY, quantization_config={"quant_method": "fbgemm_fp8"})
    with pytest.raises(ModelConfigError, match="'fbgemm_fp8' are not estimated"):
        estimate(config, **SIZES)
    with pytest.raises(ModelConfigError, match="unknown quantisation 'nf3'"):
        estimate(hf.LlamaConfig(**TINY), **SIZES, quantization="nf3")


def test_on_the_command_line(tmp_path: Any) -> None:
    pytest.importorskip("peft")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, "model_type": "llama"}))
    result = run(
        "estimate", str(path), "--batch-size", "2", "--seq-len", "96", "--preset", "exact", "--json", "--qlora"
    )
    assert result.exit_code == 0, result.output
    (row,) = (row for row in json.loads(result.stdout)["rows"] if row["preset"] == "exact")
    expected = estimate(str(path), **SIZES, quantization="nf4", lora=True)
    assert row["estimate"]["weights_bytes"] == expected.weights_bytes and row["peak_bytes"] == expected.device_bytes
    planned = plan(str(path), **SIZES, budget="4GiB", quantization="nf4", lora=True)
    assert planned.estimate.weights_bytes == expected.weights_bytes
