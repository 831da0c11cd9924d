"""Model types in any width, two layers each, for comparisons with stock at the sizes that people train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor

VOCAB = 32_003
LAYERS = 2
DECODER = (768, 2048, 4096, 8192)
ENCODER = (768, 1024)


@dataclass(frozen=True)
class Family:
    """One model type.

    Attributes:
        config: Class name of the config.
        model: Class name of the model.
        options: Makes the config's options from a width.
        widths: The widths of published checkpoints.
        task: The kind of batch: "causal", "masked", "seq2seq" or "image".
    """

    name: str
    config: str
    model: str
    options: Callable[[int], dict[str, Any]]
    widths: tuple[int, ...]
    task: str = "causal"
    quick: tuple[int, ...] = (128,)

    def build(self, width: int) -> Any:
        """A model with random weights, in which gains and biases differ from their initial ones and zeros."""
        model = getattr(hf, self.model)(getattr(hf, self.config)(**self.options(width)))
        for name, p in model.named_parameters():
            if p.dim() == 1:
                torch.nn.init.normal_(p, mean=0.0 if name.endswith("bias") else 1.0, std=0.1)
        return model

    def batch(self, tokens: int) -> dict[str, Tensor]:
        """One sequence of that many tokens; for images, three."""
        generator = torch.Generator().manual_seed(1)
        if self.task == "image":
            pixels = torch.randn(3, 3, 224, 224, generator=generator)
            return {"pixel_values": pixels, "labels": torch.randint(0, 2, (3,), generator=generator)}
        ids = torch.randint(3, VOCAB, (1, tokens), generator=generator)
        labels = ids.clone()
        if self.task == "masked":
            labels = labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.8, -100)
        return {"input_ids": ids, "labels": labels[:, :67] if self.task == "seq2seq" else labels}


def _llama(width: int, **options: Any) -> dict[str, Any]:
    """Llama's options, with an MLP 2 2/3 times as wide: published ones are 2.7 to 4 times as wide."""
    return {
        "vocab_size": VOCAB, "hidden_size": width, "num_hidden_layers": LAYERS, "num_attention_heads": width // 64,
        "num_key_value_heads": max(1, width // 256), "head_dim": 64, "intermediate_size": width // 64 * 171,
        "max_position_embeddings": 4096, "use_cache": False, "pad_token_id": 0, "attention_dropout": 0.0, **options,
    }  # fmt: skip


def _bert(width: int, **options: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB, "hidden_size": width, "num_hidden_layers": LAYERS, "num_attention_heads": width // 64,
        "intermediate_size": 4 * width, "max_position_embeddings": 1024, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, **options,
    }  # fmt: skip


def _gpt2(width: int, **options: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB, "n_embd": width, "n_layer": LAYERS, "n_head": width // 64, "n_positions": 1024,
        "use_cache": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1,
        "eos_token_id": 1, **options,
    }  # fmt: skip


def _opt(width: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB, "hidden_size": width, "num_hidden_layers": LAYERS, "num_attention_heads": width // 64,
        "ffn_dim": 4 * width, "word_embed_proj_dim": width, "max_position_embeddings": 1024, "use_cache": False,
        "dropout": 0.0, "attention_dropout": 0.0,
    }  # fmt: skip


def _t5(width: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB, "d_model": width, "d_kv": 64, "d_ff": 5 * width // 2, "num_layers": LAYERS,
        "num_heads": width // 64, "use_cache": False, "decoder_start_token_id": 0, "dropout_rate": 0.0,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    }  # fmt: skip


def _vit(width: int) -> dict[str, Any]:
    sizes = {key: value for key, value in _bert(width).items() if key not in ("vocab_size", "max_position_embeddings")}
    return {**sizes, "image_size": 224, "patch_size": 16}


FAMILIES = (
    Family("llama", "LlamaConfig", "LlamaForCausalLM", _llama, DECODER),
    Family("gpt2", "GPT2Config", "GPT2LMHeadModel", _gpt2, (768, 1024, 1600)),
    Family("bert", "BertConfig", "BertForMaskedLM", _bert, ENCODER, "masked"),
    Family("qwen3", "Qwen3Config", "Qwen3ForCausalLM", _llama, DECODER),
    Family("qwen2", "Qwen2Config", "Qwen2ForCausalLM", _llama, DECODER),
    Family(
        "mistral", "MistralConfig", "MistralForCausalLM", lambda w: _llama(w, sliding_window=200), (2048, 4096)
    ),
    Family("gemma2", "Gemma2Config", "Gemma2ForCausalLM", lambda w: _llama(w, sliding_window=200), (2304, 3584)),
    Family(
        "phi3", "Phi3Config", "Phi3ForCausalLM",
        lambda w: _llama(w, bos_token_id=1, eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0), (3072,),
    ),
    Family("t5", "T5Config", "T5ForConditionalGeneration", _t5, (768, 1024, 2048), "seq2seq"),
    Family("opt", "OPTConfig", "OPTForCausalLM", _opt, (768, 2048, 4096)),
    Family("roberta", "RobertaConfig", "RobertaForMaskedLM", lambda w: _bert(w, pad_token_id=1), ENCODER, "masked"),
    Family("vit", "ViTConfig", "ViTForImageClassification", _vit, ENCODER, "image"),
)  # fmt: skip
