"""Eager attention, with a softcap or sinks, that computes some rows of queries at a time.

The gradients are stock's, and no tensor of T x T is made.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_actcompress import CompressionConfig, kept_bytes, patch_model
from hf_actcompress.models import attention_rows, packed_masks
from hf_actcompress.ops import PackedMask, _attention_rows
from tests.families import (
    BODY,
    BY_NAME,
    MODES,
    VOCAB,
    Batch,
    Family,
    build,
    differing,
    oracle_step,
    relative_error,
    step,
)
from tests.models.test_packed import GEMMA2, packed, rows, watched_step
from tests.models.test_windows import padded
from tests.oracle import EXACT

_SIZES = {"batch": 3, "length": 60}
LLAMA = BY_NAME["llama"]
GPT_OSS = Family(
    "gpt_oss", "GptOssConfig",
    {**LLAMA.options, "head_dim": 8, "sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 2,
     "layer_types": ["sliding_attention", "full_attention"]},
    "GptOssForCausalLM", ("attention_dropout",), bit_equal=(), sizes=_SIZES,
)  # fmt: skip
EAGER = replace(LLAMA, name="llama_eager", options={**LLAMA.options, "attn_implementation": "eager"}, sizes=_SIZES)
FAMILIES = (replace(GEMMA2, sizes=_SIZES), GPT_OSS, EAGER)
families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
# a softcap that is low enough to change the values of tiny models
OPTIONS: dict[str, dict[str, Any]] = {"gemma2": {"attn_logit_softcapping": 2.0}}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tiny models compute some rows at a time too. Returns a list of the lengths of the masks that were made whole."""
    monkeypatch.setattr(packed_masks, "SMALLEST_MASK", 0)
    monkeypatch.setattr(_attention_rows, "_MOST", 8)
    made: list[int] = []
    own = PackedMask.values

    def values(mask: Any) -> Any:
        made.append(mask.shape[-1])
        return own(mask)

    monkeypatch.setattr(PackedMask, "values", values)
    return made


def model_of(family: Family, mode: str, **options: Any) -> Any:
    model = build(family, mode, **OPTIONS.get(family.name, {}), **options)
    if family is GPT_OSS:
        # stock's grouped products have no kernel for fp64
        model.set_experts_implementation("eager")
    return model


def batch_of(family: Family, given: str, seed: int = 0) -> Batch:
    batch = family.make_batch(seed=seed)
    if given == "positions":
        batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    if given == "padding":
        batch = padded(batch)
    if given == "packed":
        batches = packed(rows()), packed(rows()[::-1])
        batch = {name: torch.cat([b[name] for b in batches]) for name in ("input_ids", "position_ids", "labels")}
    return batch


@pytest.mark.daily(3)
@families
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("given", ["positions", "padding", "packed"])
def test_gradients_against_fp64(family: Family, mode: str, given: str, small: list[int]) -> None:
    errors = []
    for seed in range(2):
        batch = batch_of(family, given, seed)
        stock = model_of(family, mode)
        oracle, (loss, expected) = oracle_step(model_of(family, "fp32"), batch), step(stock, batch, mode)
        found_loss, grads = step(patch_model(stock, BODY), batch, mode)
        assert not small
        torch.testing.assert_close(found_loss, loss, rtol=1e-6 if mode == "fp32" else 1e-3, atol=0)
        errors.append((relative_error(grads, oracle), relative_error(expected, oracle)))
    ours, stocks = (sum(error) for error in zip(*errors, strict=True))
    assert ours <= EXACT * stocks


@families
@pytest.mark.parametrize("given", ["nothing", "padding", "packed"])
def test_rows_of_a_mask_are_stocks(family: Family, given: str, small: list[int]) -> None:
    model, seen = patch_model(model_of(family, "bf16")), list[Any]()
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, __, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True)
    step(model, batch_of(family, given))
    assert len(seen) == 2 and not small
    for mask in seen:
        assert isinstance(mask, PackedMask)
        kept, rows_of = _attention_rows._kept_of(mask)
        assert torch.equal(rows_of(kept)(11, 37).expand(*mask.shape[:2], -1, -1), mask.values()[:, :, 11:37])


WAYS: dict[str, Any] = {
    "checkpointed": CompressionConfig(checkpoint="every:1"),
    "attention kept": CompressionConfig(checkpoint="every:1", checkpoint_attention="kept"),
    "leaf by leaf": CompressionConfig(plans=False),
    "long": "long",
    "int8": "int8",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", [*WAYS, "reentrant", "lora"])
@pytest.mark.parametrize("family", FAMILIES[:2], ids=lambda family: family.name)
def test_in_other_ways_to_train(way: str, family: Family, small: list[int]) -> None:
    stock, batch = model_of(family, "fp32"), batch_of(family, "padding")
    if way == "lora":
        peft = pytest.importorskip("peft")
        targets = ["q_proj", "v_proj", "o_proj"]
        stock = peft.get_peft_model(stock, peft.LoraConfig(target_modules=targets, init_lora_weights=False))
    if way == "reentrant":
        stock.gradient_checkpointing_enable({"use_reentrant": True})
        stock.enable_input_require_grads()
    expected = {name: grad.double() for name, grad in step(stock, batch)[1].items()}
    found = step(patch_model(stock, WAYS.get(way, "exact")), batch)[1]
    assert relative_error(found, expected) < (0.05 if way == "int8" else 1e-5) and not small


CALLS: dict[str, dict[str, Any]] = {
    "attention's dropout": {"dropout": 0.1},
    "a cache": {"use_cache": True},
    "attentions asked for": {"output_attentions": True},
    "few tokens": {},
}


@families
@pytest.mark.parametrize("case", CALLS)
def test_stock_decides_in_all_other_calls(case: str, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    if case != "few tokens":
        monkeypatch.setattr(packed_masks, "SMALLEST_MASK", 0)
    stock = model_of(family, "bf16", **CALLS[case])
    batch = batch_of(family, "packed" if case == "a cache" else "padding")
    ours = patch_model(copy.deepcopy(stock), BODY)
    (loss, expected), (found, grads) = step(stock, batch), step(ours, batch)
    assert torch.equal(found, loss)
    assert not differing(grads, expected) if family.bit_equal else relative_error(grads, expected) < 0.01
    if case == "attentions asked for":
        assert all(torch.equal(a, b) for a, b in zip(ours(**batch).attentions, stock(**batch).attentions, strict=True))


@families
def test_module_by_module_no_probabilities_are_kept(family: Family) -> None:
    """Of a mask that has memory, too; unless somebody asks for them."""
    stock, batch = model_of(family, "fp32"), batch_of(family, "padding")
    ours = patch_model(copy.deepcopy(stock), CompressionConfig(plans=False))
    without_rows = patch_model(copy.deepcopy(stock), CompressionConfig(plans=False, selective=False))
    assert relative_error(step(ours, batch)[1], step(stock, batch)[1]) < 1e-6
    kept, more = (kept_bytes(lambda model=model: model(**batch).loss, "cpu") for model in (ours, without_rows))
    config, tokens = stock.config, batch["input_ids"].shape
    probabilities = tokens.numel() * tokens[1] * config.num_attention_heads * config.num_hidden_layers * 4
    assert kept <= more - 0.9 * probabilities
    asked = [model(**batch, output_attentions=True).attentions for model in (ours, stock)]
    assert len(asked[0]) == 2 and all(map(torch.equal, *asked))


def test_a_function_that_looks_across_rows_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch_model(GEMMA2.build())
    attention = model.model.layers[0].self_attn
    assert attention_rows.goes_in_rows(attention)
    kind = attention.stock_class
    own = attention_rows.eager_function_of(kind)

    def across(module: Any, *args: Any, **kwargs: Any) -> Any:
        out, probabilities = own(module, *args, **kwargs)
        return out - out.mean(1, keepdim=True), probabilities

    assert not attention_rows._are_apart(attention, across)


@pytest.mark.parametrize("family", FAMILIES[:2], ids=lambda family: family.name)
def test_memory_grows_with_the_tokens(family: Family) -> None:
    """Measures the largest block of memory in steps of 1,024 and 2,048 tokens.

    The loss of 1,024 tokens is bit-equal to stock's.
    """
    options = {"max_position_embeddings": 2048, "sliding_window": 64, "num_attention_heads": 2}
    stock, sizes, losses = model_of(family, "fp32", **options), [], []
    for config in (None, "exact", CompressionConfig(checkpoint="every:1")):
        model = stock if config is None else patch_model(copy.deepcopy(stock), config)
        for length in (1024,) if config is None else (1024, 2048):
            ids = torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(0))
            mask = torch.ones_like(ids)
            mask[:, -100:] = 0
            batch = {"input_ids": ids, "labels": ids, "attention_mask": mask}
            loss, _, size = watched_step(model, batch, "fp32")
            losses.append(loss)
            sizes.append(size)
            assert length > 1024 or torch.equal(loss, losses[0])
    whole = sizes[0]
    assert whole >= 1024**2 * 4 * 2
    for once, twice in (sizes[1:3], sizes[3:5]):
        assert once <= whole / 3.9 and twice <= 2.1 * once
