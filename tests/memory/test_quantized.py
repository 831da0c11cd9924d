"""Estimates of QLoRA: weights of 4 and 8 bits, against bitsandbytes on a CPU, and from a config alone."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from hf_actcompress import CompressionConfig, estimate, kept_bytes, measure_step, patch_model
from hf_actcompress.errors import ModelConfigError
from hf_actcompress.memory import plan
from hf_actcompress.memory.estimation.quantized.model import quantize
from hf_actcompress.models.gated_mlps import find_gated_mlp
from tests.cli.invoke import run

pytestmark = pytest.mark.daily(4)

SIZES = {"batch_size": 2, "seq_len": 96}
TINY = {
    "vocab_size": 500, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 256, "use_cache": False, "dtype": "bfloat16", "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "dtype": "bfloat16", "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
GPT_OSS = {
    "vocab_size": 500, "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "intermediate_size": 256, "num_local_experts": 8, "num_experts_per_tok": 4, "dtype": "bfloat16",
    "architectures": ["GptOssForCausalLM"],
}  # fmt: skip
MXFP4 = {"quant_method": "mxfp4"}
GIB = 2**30


def torchao(kind: str, **data: Any) -> dict[str, Any]:
    """The `quantization_config` that torchao writes into a config.json."""
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_version": 2, "_data": data}}}


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


def as_measured(model: Any, config: str) -> Any:
    """The estimate of a loaded model, which is patched and measured after that."""
    ids = torch.randint(3, 500, (2, 96))
    found = estimate(model, **SIZES, config=config, device="cpu")
    if config != "stock":
        patch_model(model, config)
    model(input_ids=ids, labels=ids).loss.backward()
    kept = kept_bytes(lambda: model(input_ids=ids, labels=ids).loss, "cpu")
    peak = measure_step(lambda: model(input_ids=ids, labels=ids).loss.backward(), "cpu").peak_bytes
    print(config, found.kept_bytes / kept, found.step_peak_bytes / peak)
    assert found.kept_bytes == pytest.approx(kept, rel=0.01)
    assert found.step_peak_bytes == pytest.approx(peak, rel=0.05)
    return found


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_a_loaded_model_and_its_config(kind: str) -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    for config in ("stock", "exact", "int8"):
        model = loaded(kind)
        found = as_measured(model, config)
        alone = estimate(hf.LlamaConfig(**TINY), **SIZES, config=config, device="cpu", quantization=kind, lora=8)
        assert alone.kept_bytes == found.kept_bytes
        weights = sum(p.nbytes for p in model.parameters())
        assert weights < found.weights_bytes < 1.15 * weights
        assert alone.weights_bytes == pytest.approx(found.weights_bytes, rel=0.01)


def with_torchao(kind: str) -> Any:
    """As `from_pretrained` loads it with a TorchAoConfig, and adapters on all linear layers but the head."""
    import peft
    from torchao import quantization

    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**TINY)).bfloat16().requires_grad_(False)
    filtered = {"filter_fn": lambda module, name: type(module) is nn.Linear and name != "lm_head"}
    quantization.quantize_(model, getattr(quantization, kind)(), **filtered)
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear")).train()


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_a_model_of_torchao_and_its_config(kind: str) -> None:
    """Its products hold a copy of each weight in 16 bits from the forward to the backward."""
    pytest.importorskip("torchao")
    pytest.importorskip("peft")
    for config in ("stock", "exact", "int8"):
        found = as_measured(with_torchao(kind), config)
        said = {**SIZES, "config": config, "device": "cpu", "quantization": torchao(kind), "lora": 8}
        alone = estimate(hf.LlamaConfig(**TINY), **said)
        assert alone.kept_bytes == found.kept_bytes
        # the angles' frequencies, which `bfloat16()` casts and a config does not
        assert alone.weights_bytes == pytest.approx(found.weights_bytes, rel=1e-3)


def test_a_weight_of_torchao_whose_bytes_are_not_known() -> None:
    """Its shape and dtype say 16 bits, which it does not take."""
    quantization = pytest.importorskip("torchao.quantization")
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**TINY)).bfloat16()
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
    with pytest.raises(ModelConfigError, match="Int8Tensor of torchao, whose bytes in use are not known"):
        estimate(model, **SIZES)


CONFIGS: dict[str, Any] = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "torchao": torchao("Int4WeightOnlyConfig", group_size=128),
    "torchao, older": {
        "quant_method": "torchao", "quant_type": "int4_weight_only", "quant_type_kwargs": {"group_size": 128},
    },
}  # fmt: skip


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


def test_weights_that_are_all_frozen_are_said() -> None:
    with pytest.raises(ModelConfigError, match="no weight of LlamaForCausalLM that its loss depends on is trained"):
        estimate(hf.LlamaConfig(**TINY), **SIZES, quantization="nf4")


def test_an_unknown_method_is_said() -> None:
    config = hf.LlamaConfig(**TINY, quantization_config={"quant_method": "fbgemm_fp8"})
    with pytest.raises(ModelConfigError, match="'fbgemm_fp8' are not estimated"):
        estimate(config, **SIZES)
    with pytest.raises(ModelConfigError, match="unknown quantisation 'nf3'"):
        estimate(hf.LlamaConfig(**TINY), **SIZES, quantization="nf3")
    with pytest.raises(ModelConfigError, match="torchao with 'UIntXWeightOnlyConfig' are not estimated"):
        estimate(hf.LlamaConfig(**TINY), **SIZES, quantization=torchao("UIntXWeightOnlyConfig"))
    with pytest.raises(ModelConfigError, match="its embeddings"):
        estimate(
            hf.LlamaConfig(**TINY), **SIZES,
            quantization={**torchao("Int8WeightOnlyConfig"), "include_input_output_embeddings": True},
        )  # fmt: skip
    with pytest.raises(ModelConfigError, match="LlamaForCausalLM has none to pack"):
        estimate(hf.LlamaConfig(**TINY), **SIZES, quantization=MXFP4)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_experts_in_mxfp4(checkpointing: bool) -> None:
    """Packed they take 4 bits and a byte for each 32, and one layer's are there as a copy; nothing more is kept."""
    config = hf.GptOssConfig(**GPT_OSS)
    options: Any = {**SIZES, "config": "stock", "lora": 8, "device": "cpu", "gradient_checkpointing": checkpointing}
    plain, packed = estimate(config, **options), estimate(config, **options, quantization=MXFP4)
    weights = 6 * 8 * 3 * 256 * 256
    assert plain.weights_bytes - packed.weights_bytes == weights * 2 - weights * 17 // 32
    assert packed.kept_bytes == plain.kept_bytes
    # of a layer's
    assert 0 < packed.step_peak_bytes - plain.step_peak_bytes <= 2 * weights // 6
    assert "does not train experts in mxfp4" in str(packed)
    whole = estimate(config, **options, quantization={**MXFP4, "dequantize": True})
    assert whole.weights_bytes == plain.weights_bytes and not whole.notes


def test_what_of_gpt_oss_is_not_converted() -> None:
    config = hf.GptOssConfig(**GPT_OSS, quantization_config={**MXFP4, "modules_to_not_convert": ["model.layers.[01]"]})
    options: Any = {**SIZES, "config": "stock", "lora": 8}
    of_four = estimate(config, **options).weights_bytes
    of_six = estimate(hf.GptOssConfig(**GPT_OSS), **options, quantization=MXFP4).weights_bytes
    layer = 8 * 3 * 256 * 256
    assert of_four - of_six == 2 * (layer * 2 - layer * 17 // 32)


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


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_tile_of_packed_weights_has_as_many_rows_as_of_plain_ones(kind: str) -> None:
    """Each tile unpacks all weights again, so that small ones cost time. A loaded model and an estimate's agree."""
    pytest.importorskip("bitsandbytes")
    plain: Any = hf.LlamaForCausalLM(hf.LlamaConfig(**{**TINY, "hidden_size": 1024, "num_hidden_layers": 1}))
    packed, estimated = copy.deepcopy(plain), copy.deepcopy(plain).to("meta")
    mlp = packed.model.layers[0].mlp
    for name in ("gate_proj", "up_proj", "down_proj"):
        setattr(mlp, name, quantized(getattr(mlp, name), kind))
    quantize(estimated, kind)
    config = CompressionConfig(tiled_mlp="auto")
    sites = [find_gated_mlp(model.model.layers[0].mlp, config) for model in (plain, packed, estimated)]
    assert [site.settings.tile for site in sites] == [512] * 3
