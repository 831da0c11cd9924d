"""Bytes per token and layer, in units of the hidden size: half the difference between models of 4 and 2 layers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from transformers.initialization import no_init_weights

from hf_actcompress import kept_bytes, measure_step
from tests.quick_products import quick_products

VOCAB, BATCH = 128, 2
Build = Callable[..., Any]
Prepare = Callable[[Any], Any]


def bert(layers: int, hidden: int = 768, vocab_size: int = VOCAB, **options: Any) -> Any:
    config = hf.BertConfig(
        vocab_size=vocab_size, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden, attention_probs_dropout_prob=0.0, **options,
    )  # fmt: skip
    return hf.BertForMaskedLM(config)


def gpt2(layers: int, hidden: int = 768, vocab_size: int = VOCAB, **options: Any) -> Any:
    config = hf.GPT2Config(
        vocab_size=vocab_size, n_embd=hidden, n_layer=layers, n_head=hidden // 64,
        **{"attn_pdrop": 0.0, "use_cache": False, **options},
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config)


def llama(layers: int, hidden: int = 1024, vocab_size: int = VOCAB, **options: Any) -> Any:
    heads = hidden // 64
    config = hf.LlamaConfig(
        vocab_size=vocab_size, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4), intermediate_size=hidden * 7 // 2, **{"use_cache": False, **options},
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


@dataclass(frozen=True)
class Slope:
    """Bytes per token and layer, in units of the hidden size."""

    kept: float
    peak: float


def _cheaply_filled(build: Build, layers: int, dtype: torch.dtype) -> Any:
    """A model with constant weights. Random ones would not change the bytes, and would take longer than the forward."""
    with no_init_weights():
        model = build(layers).to(dtype)
    for p in model.parameters():
        p.detach().fill_(0.01)
    return model


def slope(
    build: Build,
    dtype: torch.dtype = torch.bfloat16,
    *,
    prepare: Prepare = lambda model: model,
    autocast: bool = False,
    peak: bool = False,
    length: int = 512,
    batch: dict[str, Any] | None = None,
) -> Slope:
    """The slope of `prepare(build(layers))`. The peak is that of a forward and backward while old gradients exist."""
    ids = torch.randint(3, VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(0))
    inputs = batch if batch is not None else {"input_ids": ids, "labels": ids}
    kept, peaks, hidden = [], [], 0
    for layers in (2, 4):
        model = prepare(_cheaply_filled(build, layers, dtype)).train()
        hidden = model.config.hidden_size

        def forward(model: Any = model) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                return model(**inputs)

        def step(forward: Callable[[], Any] = forward) -> None:
            forward().loss.backward()

        with nullcontext() if peak else quick_products():
            kept.append(kept_bytes(forward, "cpu"))
        if peak:
            step()
            peaks.append(measure_step(step, "cpu").peak_bytes)
    unit = 2 * BATCH * length * hidden
    return Slope((kept[1] - kept[0]) / unit, (peaks[1] - peaks[0]) / unit if peak else 0.0)
