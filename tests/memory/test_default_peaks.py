"""Peaks with gradient checkpointing: the default beside what Axolotl publishes, and lengths that Unsloth publishes."""

from __future__ import annotations

from typing import Any

import pytest
import transformers as hf

from hf_actcompress import CompressionConfig, estimate

GIB = 2**30
_LLAMA: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128_256,
}  # fmt: skip
_QWEN: dict[str, Any] = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
_SMALL: dict[str, Any] = {
    **_QWEN, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
}  # fmt: skip
_LARGE: dict[str, Any] = {
    **_QWEN, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
}  # fmt: skip
QLORA: dict[str, dict[str, Any]] = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
# class of the config, its sizes, tokens of one sequence, and GiB: Axolotl's (fused LoRA kernels, Liger's losses,
# checkpointing), and what whole logits would add to it
ROWS = {
    "Llama-3.2-1B, 32k": (hf.LlamaConfig, _LLAMA, 2**15, 6.90, 4.2),
    "Llama-3.2-1B, 128k": (hf.LlamaConfig, _LLAMA, 2**17, 20.26, 16.6),
    "Qwen3-1.7B, 128k": (hf.Qwen3Config, _SMALL, 2**17, 26.82, 24.8),
    "Qwen3-4B, 64k": (hf.Qwen3Config, _LARGE, 2**16, 26.24, 8.7),
}


@pytest.mark.daily(2)
@pytest.mark.parametrize("name", ROWS)
def test_the_default_and_long(name: str) -> None:
    """LoRA (r = 16) on all linear layers in bf16."""
    config, sizes, tokens, published, logits = ROWS[name]
    model = config(**sizes, max_position_embeddings=tokens, tie_word_embeddings=True, use_cache=False)
    model.architectures = ["LlamaForCausalLM" if config is hf.LlamaConfig else "Qwen3ForCausalLM"]
    options: dict[str, Any] = {"gradient_checkpointing": True, "dtype": "bfloat16", "lora": 16}
    found = {
        preset: estimate(model, batch_size=1, seq_len=tokens, config=preset, **options) for preset in ("exact", "long")
    }
    for preset, estimated in found.items():
        assert estimated.device_bytes <= published * GIB, preset
    # nothing of vocabulary size is among what is kept
    assert found["exact"].kept_by_role.get("loss_head", 0) < logits * GIB / 8


# size, GiB of a card, and the tokens of one sequence that Unsloth publishes for QLoRA on it, with the inputs of
# checkpointed layers on the host
UNSLOTH = (("8B", 8, 2_972), ("8B", 24, 78_475), ("8B", 80, 342_733), ("70B", 48, 12_106), ("70B", 80, 89_389))


@pytest.mark.daily(2)
@pytest.mark.parametrize(("size", "card", "tokens"), UNSLOTH)
def test_lengths_that_unsloth_publishes_fit(size: str, card: int, tokens: int) -> None:
    """QLoRA (r = 32), the inputs of checkpointed layers on the host; fragmentation is not counted."""
    model = hf.LlamaConfig(
        **QLORA[size], num_key_value_heads=8, vocab_size=128_256, max_position_embeddings=tokens, use_cache=False
    )
    options: dict[str, Any] = {"gradient_checkpointing": True, "dtype": "bfloat16", "lora": 32}
    options |= {"quantization": "nf4", "optimizer": "adamw_8bit"}
    config = CompressionConfig.from_preset("long", checkpoint_input="offload")
    found = estimate(model, batch_size=1, seq_len=tokens, config=config, **options)
    assert found.device_bytes <= card * GIB
