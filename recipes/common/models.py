"""The model: small fresh configurations built here, or one loaded by name; adapters and checkpointing on request."""

import argparse
from typing import Any

import torch
from transformers import (
    BertConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

CAUSAL_CONFIGS = ("tiny-llama", "tiny-gpt2")
BERT_CONFIGS = ("tiny-bert",)


def tiny_config(name: str, tokenizer: PreTrainedTokenizerBase, seq_len: int, **extra: Any) -> PretrainedConfig:
    """A few layers of width 256, with the family's own proportions, dropout and activation."""
    shared = dict(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **extra)
    positions = max(1024, seq_len)
    if name == "tiny-llama":
        # The widths of Llama 3: an MLP of 3.5 h and four query heads to a key head.
        ends = dict(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
        widths = dict(hidden_size=256, intermediate_size=896, num_hidden_layers=4)
        heads = dict(num_attention_heads=8, num_key_value_heads=2)
        return LlamaConfig(**shared, **ends, **widths, **heads, max_position_embeddings=positions)
    if name == "tiny-gpt2":
        ends = dict(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
        return GPT2Config(**shared, **ends, n_embd=256, n_layer=4, n_head=4, n_positions=positions)
    if name == "tiny-bert":
        widths = dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4)
        return BertConfig(**shared, **widths, max_position_embeddings=positions)
    raise ValueError(f"unknown config {name!r}; there are {(*CAUSAL_CONFIGS, *BERT_CONFIGS)}")


def build_model(
    args: argparse.Namespace, auto_class: Any, tokenizer: PreTrainedTokenizerBase, **extra: Any
) -> PreTrainedModel:
    """The model of --model or --config as `auto_class` makes it, e.g. AutoModelForCausalLM."""
    dtype = getattr(torch, args.dtype)
    if args.model:
        try:
            model = auto_class.from_pretrained(args.model, dtype=dtype, **extra)
        except (OSError, ValueError) as error:
            raise SystemExit(f"--model {args.model}: {error}") from error
        _check_fits(model.config, tokenizer, args)
    else:
        model = auto_class.from_config(tiny_config(args.config, tokenizer, args.seq_len, **extra), dtype=dtype)
    if args.gradient_checkpointing:
        # transformers 5.23 renamed it; the old name still works there, with a warning.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    return model


def _check_fits(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> None:
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and args.seq_len > positions:
        raise SystemExit(f"--seq-len {args.seq_len}: {args.model} has {positions} positions")
    if len(tokenizer) > config.vocab_size:
        raise SystemExit(f"--model {args.model}: {len(tokenizer)} tokens, but embeddings for {config.vocab_size}")


def add_lora(args: argparse.Namespace, model: PreTrainedModel, task: str | None) -> PreTrainedModel:
    """The model with adapters on every linear layer when --lora asks for them; `task` is a peft TaskType."""
    if not args.lora:
        return model
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type=task,
        r=args.lora_r,
        lora_alpha=2 * args.lora_r,
        lora_dropout=args.lora_dropout,
        target_modules="all-linear",
    )
    return get_peft_model(model, config)


def trainable_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that the optimizer gets: with adapters, only those."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def without_dropout(model: Any) -> Any:
    """The model, changed so that it computes the same in every forward."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        # attention has its own attribute for dropout
        for name in ("attention_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def nudge(model: torch.nn.Module, dtype: torch.dtype, seed: int) -> None:
    """Move every weight by about one rounding of `dtype`: the control that shows what rounding alone does to a run."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=generator).mul_(2).sub_(1)
            step = signs.to(parameter.device, torch.float32) * torch.finfo(dtype).eps / 2
            parameter.copy_(parameter.float() * (1 + step))
