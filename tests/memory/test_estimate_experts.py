"""Estimates of mixtures of experts, compared with the CPU allocator's events of the real step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig

from hf_actcompress.errors import ModelConfigError
from hf_actcompress.memory import estimate
from tests.memory.test_estimate import BF16, FP32, real

SIZES: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts_per_tok": 2, "use_cache": False, "pad_token_id": 0,
}  # fmt: skip
BUILDS: dict[str, tuple[Any, dict[str, int]]] = {
    "mixtral": (hf.MixtralForCausalLM, {"num_local_experts": 4, "intermediate_size": 256}),
    "qwen3_moe": (hf.Qwen3MoeForCausalLM, {"num_experts": 8, "moe_intermediate_size": 96, "head_dim": 32}),
}


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("config", ["stock", "exact"])
@pytest.mark.parametrize("name", BUILDS)
def test_experts(name: str, config: str, dtype: torch.dtype) -> None:
    cls, own = BUILDS[name]
    torch.manual_seed(0)
    model = cls(cls.config_class(**SIZES, **own)).to(dtype)
    found = estimate(model, batch_size=2, seq_len=128, config=config, device="cpu")
    kept, peak = real(model, config, 2, 128)
    print(f"kept {found.kept_bytes} for {kept}, peak {found.step_peak_bytes} for {peak}")
    assert found.kept_bytes == pytest.approx(kept, rel=0.01)
    assert found.step_peak_bytes == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("config", ["stock", "exact"])
@pytest.mark.parametrize("name", BUILDS)
def test_experts_with_lora(name: str, config: str) -> None:
    """Stock keeps the weights that the adapter makes of all layers; exact makes those of a layer again in backward."""
    cls, own = BUILDS[name]
    torch.manual_seed(0)
    model = cls(cls.config_class(**SIZES, **own)).to(BF16)
    lora = LoraConfig(
        r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    )
    found = estimate(model, batch_size=2, seq_len=128, config=config, device="cpu", lora=copy.deepcopy(lora))
    kept, peak = real(model, config, 2, 128, lora)
    print(f"kept {found.kept_bytes} for {kept}, peak {found.step_peak_bytes} for {peak}")
    assert found.kept_bytes == pytest.approx(kept, rel=0.01)
    assert found.step_peak_bytes == pytest.approx(peak, rel=0.05)
    weights = 6 * sum(p.nbytes for n, p in model.named_parameters() if "layers.0.mlp.experts" in n and "lora" not in n)
    assert (kept > 2 * weights) is (config == "stock")


def test_parameters_that_are_not_there_are_an_error() -> None:
    """Packed experts have no weights that PEFT could adapt, and PEFT itself says nothing."""
    config = hf.GptOssConfig(
        vocab_size=500, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, num_local_experts=4, head_dim=32, quantization_config={"quant_method": "mxfp4"},
    )  # fmt: skip
    lora = LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    with pytest.raises(ModelConfigError, match=r"no parameter .*mlp\.experts\.down_proj"):
        estimate(config, batch_size=1, seq_len=64, lora=lora)
