"""The benchmark's models: blocks of BERT, GPT-2 and Llama in any width, and the published shapes; fresh weights."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class Shape:
    """What sizes a model."""

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
        max_position_embeddings=max(512, positions),
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


FAMILIES: dict[str, Callable[[Shape, int], Any]] = {"bert": bert, "gpt2": gpt2, "llama": llama}

# the published ones; Llama-3.1-8B with 4 of its 32 layers
SHAPES: dict[str, tuple[str, Shape]] = {
    "bert-base": ("bert", Shape(768, 12, 12, 12, 3072, 30522)),
    "bert-large": ("bert", Shape(1024, 24, 16, 16, 4096, 30522)),
    "gpt2-small": ("gpt2", Shape(768, 12, 12, 12, 3072, 50257)),
    "gpt2-medium": ("gpt2", Shape(1024, 24, 16, 16, 4096, 50257)),
    "llama-1b": ("llama", Shape(2048, 16, 32, 8, 8192, 128256)),
    "llama-8b-4layers": ("llama", Shape(4096, 4, 32, 8, 14336, 128256)),
}
MODELS = (*FAMILIES, *SHAPES)


def shape_of(name: str, args: argparse.Namespace) -> tuple[str, Shape]:
    """The family of a model and its sizes: published, or from --hidden, --layers and --vocab."""
    if name in SHAPES and not args.quick:
        return SHAPES[name]
    family = SHAPES[name][0] if name in SHAPES else name
    ffn, key_heads = (args.hidden * 7 // 2, args.hidden // 256) if family == "llama" else (4 * args.hidden, 0)
    return family, Shape(args.hidden, args.layers, args.hidden // 64, max(1, key_heads), ffn, args.vocab)


def build(family: str, shape: Shape, args: argparse.Namespace, dropout: float | None = None) -> Any:
    """The stock model in train mode, the same weights every time; adapters on request."""
    torch.manual_seed(0)
    with torch.device(args.device):
        model = FAMILIES[family](shape, args.seq_len)
    model = model.to(getattr(torch, args.dtype)).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0:
            module.p = args.dropout if dropout is None else dropout
    if args.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", lora_dropout=args.lora_dropout))
    return model
