"""The benchmark's models in any width or in published shapes, with fresh weights.

Blocks of BERT, GPT-2 and Llama, and mixtures of experts at the proportions of Mixtral-8x7B and Qwen3-30B-A3B.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; `ffn` is that of each expert if it has experts."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    ffn: int
    vocab: int


def bert(shape: Shape, positions: int) -> Any:
    config = BertConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, intermediate_size=shape.ffn, attention_probs_dropout_prob=0.0,
        max_position_embeddings=max(512, positions), use_cache=False,
    )  # fmt: skip
    return BertForMaskedLM(config)


def gpt2(shape: Shape, positions: int) -> Any:
    config = GPT2Config(
        vocab_size=shape.vocab, n_embd=shape.hidden, n_layer=shape.layers, n_head=shape.heads, n_inner=shape.ffn,
        n_positions=max(1024, positions), attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama(shape: Shape, positions: int) -> Any:
    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.key_heads, intermediate_size=shape.ffn,
        max_position_embeddings=positions, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def mixtral(shape: Shape, positions: int) -> Any:
    """Mixtral with half of its experts, because kept bytes depend only on the experts that each token takes."""
    config = MixtralConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.key_heads, intermediate_size=shape.ffn,
        num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=positions, use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def qwen3_moe(shape: Shape, positions: int) -> Any:
    """Qwen3-MoE with 16 of its 128 experts."""
    config = Qwen3MoeConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, num_hidden_layers=shape.layers, head_dim=128,
        num_attention_heads=shape.heads, num_key_value_heads=shape.key_heads, moe_intermediate_size=shape.ffn,
        num_experts=16, num_experts_per_tok=8, max_position_embeddings=positions, use_cache=False,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


Make = Callable[[Shape, int], Any]
FAMILIES: dict[str, Make] = {"bert": bert, "gpt2": gpt2, "llama": llama}
# models that are measured only if they are asked for
MIXTURES: dict[str, Make] = {"mixtral": mixtral, "qwen3_moe": qwen3_moe}

# published shapes; Llama-3.1-8B, Mixtral-8x7B and Qwen3-30B-A3B with few of their layers
SHAPES: dict[str, tuple[str, Shape]] = {
    "bert-base": ("bert", Shape(768, 12, 12, 12, 3072, 30522)),
    "bert-large": ("bert", Shape(1024, 24, 16, 16, 4096, 30522)),
    "gpt2-small": ("gpt2", Shape(768, 12, 12, 12, 3072, 50257)),
    "gpt2-medium": ("gpt2", Shape(1024, 24, 16, 16, 4096, 50257)),
    "llama-1b": ("llama", Shape(2048, 16, 32, 8, 8192, 128256)),
    "llama-8b-4layers": ("llama", Shape(4096, 4, 32, 8, 14336, 128256)),
    "mixtral-8x7b-2layers": ("mixtral", Shape(4096, 2, 32, 8, 14336, 32000)),
    "qwen3-30b-a3b-4layers": ("qwen3_moe", Shape(2048, 4, 32, 4, 768, 151936)),
}
MODELS = (*FAMILIES, *MIXTURES, *SHAPES)
# family -> (the MLP's width over the hidden size, how many hidden units there are per head of keys)
_PROPORTIONS = {"llama": (3.5, 256), "mixtral": (3.5, 512), "qwen3_moe": (0.375, 512)}


def shape_of(name: str, args: argparse.Namespace) -> tuple[str, Shape]:
    """The family of a model and its sizes: published, or from --hidden, --layers and --vocab."""
    if name in SHAPES and not args.quick:
        return SHAPES[name]
    family = SHAPES[name][0] if name in SHAPES else name
    wide, units = _PROPORTIONS.get(family, (4, args.hidden))
    heads = args.hidden // (128 if family == "mixtral" else 64)
    ffn, key_heads = int(wide * args.hidden), max(1, args.hidden // units)
    return family, Shape(args.hidden, args.layers, heads, key_heads, ffn, args.vocab)


def build(family: str, shape: Shape, args: argparse.Namespace, dropout: float | None = None) -> Any:
    """The stock model in train mode, with the same weights every time, and with adapters on request."""
    torch.manual_seed(0)
    with torch.device(args.device):
        model = {**FAMILIES, **MIXTURES}[family](shape, args.seq_len)
    model = model.to(getattr(torch, args.dtype)).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0:
            module.p = args.dropout if dropout is None else dropout
    return with_adapters(model, 16, args.lora_dropout) if args.lora else model


def with_adapters(model: Any, rank: int, dropout: float = 0.0) -> Any:
    """The model in peft's wrapper, with adapters on all linear layers. They are in the model itself, too."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", lora_dropout=dropout))
