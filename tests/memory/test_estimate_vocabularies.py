"""Estimates of models with the vocabularies that they are shipped with, where the logits are most of the peak.

Width, depth and the number of tokens are small, so that any machine can run a step of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

from hf_actcompress import CompressionConfig, estimate
from tests.memory.test_estimate import BF16, FP32, real

WIDTH, BATCH, LENGTH = 64, 2, 64
_SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 4 * WIDTH}
_DECODER = {**_SIZES, "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0}
_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
BUILDS: dict[str, tuple[int, Callable[[], Any]]] = {
    "bert": (30_522, lambda: hf.BertForMaskedLM(hf.BertConfig(**_SIZES, **_BERT))),
    "gpt2": (50_257, lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=WIDTH, n_layer=2, n_head=4, **_GPT2))),
    "llama-3": (128_256, lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_DECODER, vocab_size=128_256))),
    # a softcap on the logits, and weights that the head shares with the embedding
    "gemma-2": (256_000, lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**_DECODER, vocab_size=256_000, head_dim=16))),
}


@pytest.mark.daily(3)
@pytest.mark.parametrize(
    ("config", "dtype", "autocast"),
    [("stock", FP32, BF16), ("exact", FP32, None), ("int8", BF16, None), (CompressionConfig(logits=False), FP32, BF16)],
    ids=["stock-autocast", "exact-fp32", "int8-bf16", "no logits-autocast"],
)
@pytest.mark.parametrize("name", BUILDS)
def test_shipped_vocabularies(name: str, config: Any, dtype: torch.dtype, autocast: torch.dtype | None) -> None:
    vocabulary, build = BUILDS[name]
    model = build().to(dtype)
    assert model.config.vocab_size == vocabulary
    found = estimate(model, batch_size=BATCH, seq_len=LENGTH, config=config, device="cpu", autocast=autocast)
    kept, peak = real(model, config, BATCH, LENGTH, autocast=autocast)
    print(f"kept {found.kept_bytes} for {kept}, peak {found.step_peak_bytes} for {peak}")
    assert found.kept_bytes == pytest.approx(kept, rel=0.01)
    assert found.step_peak_bytes == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("config", ["exact", "int8"])
def test_a_codec_leaves_logits_that_are_capped_alone(config: str) -> None:
    _, build = BUILDS["gemma-2"]
    torch.manual_seed(0)
    model = build()
    logits = BATCH * LENGTH * model.config.vocab_size * 4
    _, peak = real(model, config, BATCH, LENGTH)
    # two tensors of the logits' size: their tanh, which the model's graph holds, and the result; the head overwrites
    # its own logits
    assert peak < 2.1 * logits
