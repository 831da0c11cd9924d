"""What the other families keep per layer in bf16, patched and stock, counted by the allocator.

The configs are small, in the proportions of the real ones. Dropout has its default value, attention dropout is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf

from hf_actcompress import patch_model
from tests.slopes import VOCAB, slope

pytestmark = pytest.mark.daily(2)

H = 256
_BERT = {"vocab_size": VOCAB, "hidden_size": H, "num_attention_heads": 4, "intermediate_size": 4 * H}
_LLAMA = {**_BERT, "intermediate_size": 7 * H // 2, "num_key_value_heads": 1, "use_cache": False, "pad_token_id": 0}
# T5's one dropout probability is also the attention's, which on a CPU would make stock keep the probabilities
_T5 = {
    "vocab_size": VOCAB, "d_model": H, "d_kv": 64, "d_ff": 4 * H, "num_heads": 4, "decoder_start_token_id": 0,
    "use_cache": False, "dropout_rate": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A family; `ratio` is the most that patched may keep of what stock keeps."""

    name: str
    build: Callable[[int], Any]
    ratio: float = 0.7
    image: bool = False


def _row(
    name: str, model: str, config: str, depth: str = "num_hidden_layers", ratio: float = 0.7, **options: Any
) -> Row:
    def build(layers: int) -> Any:
        return getattr(hf, model)(getattr(hf, config)(**{**options, depth: layers}))

    return Row(name, build, ratio, image="image_size" in options)


ROWS = [
    _row("qwen2", "Qwen2ForCausalLM", "Qwen2Config", **_LLAMA),
    _row("qwen3", "Qwen3ForCausalLM", "Qwen3Config", **_LLAMA, head_dim=64),
    _row("mistral", "MistralForCausalLM", "MistralConfig", **_LLAMA, sliding_window=None),
    _row("mistral-window", "MistralForCausalLM", "MistralConfig", **_LLAMA, sliding_window=128),
    _row("gemma", "GemmaForCausalLM", "GemmaConfig", **_LLAMA, head_dim=64),
    _row("phi3", "Phi3ForCausalLM", "Phi3Config", **_LLAMA, bos_token_id=1, eos_token_id=2),
    # stock keeps only 28 h, because autograd keeps the output of a ReLU, which the next linear keeps anyway. The least
    # is 20 h. The layer's two dropouts are function calls, whose masks the option `net` keeps as bits
    _row(
        "opt", "OPTForCausalLM", "OPTConfig", ratio=0.75, vocab_size=VOCAB, hidden_size=H, word_embed_proj_dim=H,
        num_attention_heads=4, ffn_dim=4 * H, use_cache=False,
    ),
    _row(
        "roberta", "RobertaForMaskedLM", "RobertaConfig", **_BERT, max_position_embeddings=520, pad_token_id=1,
        attention_probs_dropout_prob=0.0,
    ),
    _row(
        "distilbert", "DistilBertForMaskedLM", "DistilBertConfig", "n_layers", vocab_size=VOCAB, dim=H, n_heads=4,
        hidden_dim=4 * H, attention_dropout=0.0,
    ),
    _row(
        "modernbert", "ModernBertForMaskedLM", "ModernBertConfig",
        **{**_BERT, "intermediate_size": 3 * H // 2}, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1,
        sep_token_id=2,
    ),
    _row("t5", "T5ForConditionalGeneration", "T5Config", "num_layers", **_T5),
    _row(
        "t5-gated", "T5ForConditionalGeneration", "T5Config", "num_layers",
        **{**_T5, "d_ff": 5 * H // 2, "feed_forward_proj": "gated-gelu"},
    ),
    _row("vit", "ViTForImageClassification", "ViTConfig", **_BERT, image_size=128, patch_size=8),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_kept_bytes_per_layer(row):
    options: dict[str, Any] = {}
    if row.image:
        pixels = torch.zeros(2, 3, 128, 128, dtype=torch.bfloat16)
        options = {"batch": {"pixel_values": pixels, "labels": torch.tensor([0, 1])}, "length": 257}
    stock, ours = slope(row.build, **options).kept, slope(row.build, prepare=patch_model, **options).kept
    print(f"{row.name}: {stock:.2f} h stock, {ours:.2f} h patched")
    assert ours <= row.ratio * stock


def test_functional_dropout_of_opt_costs_states():
    opt = next(row for row in ROWS if row.name == "opt")

    def without_dropout(model: Any) -> Any:
        for module in model.modules():
            if hasattr(module, "dropout"):
                module.dropout = 0.0
        return patch_model(model)

    # a layer keeps two states of the CPU's generator; the figure is for 2 x 512 tokens of 256 features
    with_dropout = slope(opt.build, prepare=patch_model).kept
    states = 2 * torch.get_rng_state().numel() / (2 * 512 * 256)
    assert with_dropout - slope(opt.build, prepare=without_dropout).kept == pytest.approx(states)
    assert slope(opt.build, prepare=without_dropout).kept <= 20.5
