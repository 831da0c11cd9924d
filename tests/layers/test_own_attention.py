"""Layers whose attention runs again in backward: it has a position bias (T5) or is the model's eager one (Gemma 2)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from hf_actcompress import patch_model
from hf_actcompress.memory.measurement.allocator import allocator_trace, kept_bytes
from tests.families import BY_NAME, VOCAB, cast_batch, differing, mode_of, relative_error, step
from tests.layers.plans import DTYPES, LEAVES, MODES, PLANS, calls, patched

GEMMA2 = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "sliding_window": 6, "attn_logit_softcapping": 2.0,
}  # fmt: skip
FAMILIES = ("t5", "t5-gated", "gemma2")


def build(name: str, dtype: torch.dtype, **options: Any) -> Any:
    if name != "gemma2":
        return BY_NAME[name].build(dtype, **options)
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**GEMMA2, attention_dropout=options.get("dropout", 0.0))).to(dtype).train()


def make_batch(name: str, padding: str = "right") -> dict[str, Any]:
    return BY_NAME["llama" if name == "gemma2" else name].make_batch(padding)


def both(name: str, dtype: torch.dtype, **options: Any) -> list[Any]:
    """Models with the same weights: stock, one that runs by plans, and one that runs module by module."""
    model = build(name, dtype, **options)
    return [patched(copy.deepcopy(model), config) for config in (None, PLANS, LEAVES)]


def assert_like(name: str, found: Any, expected: Any, dtype: torch.dtype) -> None:
    (loss, grads), (other_loss, others) = found, expected
    assert torch.equal(loss, other_loss) and grads.keys() == others.keys()
    # T5's encoder may differ, because each decoder layer first adds up its own gradients of the encoder's states
    encoder = [n for n in differing(grads, others) if name == "gemma2" or "encoder" not in n and "shared" not in n]
    assert not encoder
    assert relative_error(grads, {n: g.double() for n, g in others.items()}) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_stocks_gradients_and_no_more_bytes_than_module_by_module(name: str, mode: str) -> None:
    dtype, batch = DTYPES[mode], make_batch(name)
    models = both(name, dtype)
    results = [step(model, batch, mode) for model in models[:2]]
    assert set(calls(models[1])) == {1} and len(calls(models[1])) == (2 if name == "gemma2" else 4)
    assert_like(name, results[1], results[0], torch.bfloat16 if mode == "autocast" else dtype)
    with mode_of(mode):
        kept = [kept_bytes(lambda m=m: m(**cast_batch(batch, dtype)), "cpu") for m in models[1:]]  # type: ignore[misc]
    assert kept[0] <= kept[1]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("checkpointed", (False, True))
def test_dropout_of_probabilities(name: str, checkpointed: bool) -> None:
    models, results = both(name, torch.float32, dropout=0.2)[:2], []
    for model in models:
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        results.append(step(model, make_batch(name, "none")))
    assert_like(name, results[1], results[0], torch.float32)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_cache_is_filled_as_stock_fills_it(name: str) -> None:
    stock = build(name, torch.float32)
    plans = patch_model(copy.deepcopy(stock), PLANS)
    caches = [model(**make_batch(name), use_cache=True).past_key_values for model in (stock, plans)]
    assert min(calls(plans)) == 1
    if name != "gemma2":
        assert caches[0].is_updated == caches[1].is_updated
        caches = [[*c.self_attention_cache.layers, *c.cross_attention_cache.layers] for c in caches]
    else:
        caches = [cache.layers for cache in caches]
    assert len(caches[0]) == len(caches[1])
    for expected, found in zip(*caches, strict=True):
        assert torch.equal(found.keys, expected.keys) and torch.equal(found.values, expected.values)


@pytest.mark.parametrize(("heads", "width"), [(2, 16), (4, 64), (8, 64)])
def test_keys_and_values_lie_as_a_cache_lays_them(heads: int, width: int) -> None:
    """A cache copies them. How a product rounds may depend on strides, for some widths more than for others."""
    stock = build("t5", torch.float32, d_model=128, num_heads=heads, d_kv=width, use_cache=True)
    plans = patch_model(copy.deepcopy(stock), PLANS)
    expected, found = (step(m, make_batch("t5")) for m in (stock, plans))
    assert set(calls(plans)) == {1}
    assert_like("t5", found, expected, torch.float32)


def test_the_peak_is_no_higher() -> None:
    peaks = []
    for model in both("gemma2", torch.float32)[1:]:
        batch = {"input_ids": torch.arange(200).remainder(60)[None]}
        run = lambda model=model, batch=batch: model(**batch).logits.sum().backward()  # type: ignore[misc]  # noqa: E731
        run()
        peaks.append(allocator_trace(run).peak_bytes)
    assert peaks[0] <= peaks[1]


def test_plans_are_shared_by_layers_of_the_same_attention_alone() -> None:
    """Eager attention without a mask is not causal, so one plan for both kinds would be wrong for one of them."""
    batch = BY_NAME["phi3"].make_batch("none")
    # for the second width of heads, eager attention comes first
    for attention, heads in (("sdpa", 4), ("eager", 2), ("sdpa", 2)):
        stock = BY_NAME["phi3"].build(torch.float32, num_attention_heads=heads, num_key_value_heads=2)
        stock.set_attn_implementation(attention)
        plans = patch_model(copy.deepcopy(stock), PLANS)
        loss, grads = step(plans, batch)
        expected, wanted = step(stock, batch)
        assert set(calls(plans)) == {1} and torch.equal(loss, expected) and not differing(grads, wanted)


def test_a_softcap_that_is_changed_later() -> None:
    """The softcap is part of the plan, so the layer has another one after the change."""
    stock = build("gemma2", torch.float32)
    # under transformers 5.17 Gemma 2 has torch's fused attention by default, which leaves the softcap out
    stock.set_attn_implementation("eager")
    with torch.no_grad():
        for layer in stock.model.layers:
            layer.self_attn.q_proj.weight.mul_(100)
    plans = patch_model(copy.deepcopy(stock), PLANS)
    before = step(plans, make_batch("gemma2"))[0]
    for model in (stock, plans):
        model.zero_grad()
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = 0.1
    loss = step(plans, make_batch("gemma2"))[0]
    assert torch.equal(loss, step(stock, make_batch("gemma2"))[0]) and not torch.equal(loss, before)
