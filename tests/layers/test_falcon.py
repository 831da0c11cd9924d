"""Falcon's layers by plans: they have linear layers and attention of their own, and the config has many forms."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import FalconConfig, FalconForCausalLM

from hf_actcompress import patch_model
from hf_actcompress.memory.measurement.allocator import kept_bytes
from tests.families import VOCAB, Batch, cast_batch, differing, mode_of, step
from tests.layers.plans import DTYPES, LEAVES, MODES, PLANS, calls, patched

FORMS: dict[str, dict[str, Any]] = {
    "one head of keys": {},
    "grouped heads": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "grouped heads, one norm": {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    "as many heads of keys": {"multi_query": False},
    "biases": {"bias": True},
    "alibi, one after the other": {"alibi": True, "bias": True, "parallel_attn": False, "multi_query": False},
}


def build(form: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    config = FalconConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, bos_token_id=1, eos_token_id=2,
        **{**FORMS[form], **options},
    )  # fmt: skip
    return FalconForCausalLM(config).to(dtype).train()


def make_batch(padding: bool = True) -> Batch:
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    if padding:
        batch["attention_mask"] = (torch.arange(9) < torch.tensor([[9], [6]])).long()
    return batch


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", MODES)
def test_the_same_bits_and_bytes(form: str, mode: str) -> None:
    dtype, batch, results, kept = DTYPES[mode], make_batch(), [], []
    for config in (None, LEAVES, PLANS):
        model = patched(build(form, dtype), config)
        results.append(step(model, batch, mode))
        with mode_of(mode):
            kept.append(kept_bytes(lambda model=model: model(**cast_batch(batch, dtype)), "cpu"))  # type: ignore[misc]
    assert calls(model) == [2, 2]
    (expected, wanted), _, (loss, grads) = results
    assert torch.equal(loss, expected) and not differing(grads, wanted)
    assert kept[2] <= kept[1]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("form", ["one head of keys", "alibi, one after the other"])
def test_dropout(form: str, checkpointed: bool) -> None:
    results = []
    for config in (None, PLANS):
        model = patched(build(form, hidden_dropout=0.2, attention_dropout=0.1), config)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        results.append(step(model, make_batch()))
    assert calls(model) == [1, 1]
    assert torch.equal(results[0][0], results[1][0]) and not differing(results[1][1], results[0][1])


def test_the_cache_is_filled_as_stock_fills_it() -> None:
    stock = build("grouped heads")
    plans = patch_model(copy.deepcopy(stock), PLANS)
    expected, found = (model(**make_batch(), use_cache=True).past_key_values for model in (stock, plans))
    assert calls(plans) == [1, 1]
    for a, b in zip(expected.layers, found.layers, strict=True):
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
