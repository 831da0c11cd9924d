"""Sliding windows and chunks: stock's gradients without a mask of all tokens by all tokens."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_actcompress import CompressionConfig, estimate, patch_model
from hf_actcompress.models import packed_masks
from hf_actcompress.reference import sequences
from tests.families import BODY, BY_NAME, VOCAB, Batch, Family, build, oracle_step, relative_error, step
from tests.models.test_packed import GEMMA3, packed, rows, watched_step
from tests.oracle import EXACT

_OPTIONS = {**BY_NAME["llama"].options, "head_dim": 8}
GEMMA3N = Family(
    "gemma3n", "Gemma3nTextConfig",
    {**_OPTIONS, "num_hidden_layers": 4, "sliding_window": 6, "num_kv_shared_layers": 2, "laurel_rank": 8,
     "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "activation_sparsity_pattern": None,
     "layer_types": ["sliding_attention", "full_attention"] * 2},
    "Gemma3nForCausalLM", ("attention_dropout",),
)  # fmt: skip
LLAMA4 = Family(
    "llama4", "Llama4TextConfig",
    {**_OPTIONS, "attention_chunk_size": 6, "num_local_experts": 2, "interleave_moe_layer_step": 2,
     "intermediate_size_mlp": 56, "layer_types": ["chunked_attention", "full_attention"]},
    "Llama4ForCausalLM", ("attention_dropout",),
)  # fmt: skip
# long enough for rounding errors to average out
_SIZES = {"batch": 3, "length": 60}
MODERNBERT = BY_NAME["modernbert"]
FAMILIES = tuple(replace(family, sizes=_SIZES) for family in (BY_NAME["mistral"], GEMMA3, GEMMA3N, LLAMA4, MODERNBERT))
families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
# Gemma 3n writes a cache that it reads again, and others make one that stays empty
CACHES = (False, True)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tiny models compute in windows too. Returns a list of the lengths of the masks that were made whole."""
    monkeypatch.setattr(packed_masks, "SMALLEST_MASK", 0)
    monkeypatch.setattr(sequences, "WINDOW_STEP", 4)
    made: list[int] = []
    own = packed_masks.PackedMask.values

    def values(mask: Any) -> Any:
        made.append(mask.shape[-1])
        return own(mask)

    monkeypatch.setattr(packed_masks.PackedMask, "values", values)
    return made


def padded(batch: Batch) -> Batch:
    """Pads on the right, on the left and in between. The loss includes padding, which must attend as in stock."""
    mask = torch.ones_like(batch["input_ids"])
    length = mask.shape[1]
    mask[0, length - 17 :] = mask[1, :21] = mask[2, 30:33] = mask[2, -1] = 0
    return {"input_ids": batch["input_ids"], "labels": batch["input_ids"], "attention_mask": mask}


@pytest.mark.daily(4)
@families
@pytest.mark.parametrize("mode", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("given", ["ones", "positions", "padding"])
def test_gradients_against_fp64(family: Family, mode: str, given: str, small: list[int]) -> None:
    for cache in CACHES[given == "padding" or family.task == "masked" :]:
        errors = []
        # rounding errors of one batch differ by more than the bound from one type of CPU to another
        for seed in range(3):
            batch = family.make_batch(seed=seed)
            if given == "ones":
                batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            if given == "positions":
                batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
            if given == "padding":
                batch = padded(batch)
            stock = build(family, mode, use_cache=cache)
            oracle, (loss, expected) = oracle_step(build(family, "fp32"), batch), step(stock, batch, mode)
            found_loss, grads = step(patch_model(stock, BODY), batch, mode)
            assert not small
            torch.testing.assert_close(found_loss, loss, rtol=1e-5 if mode == "fp32" else 1e-2, atol=0)
            errors.append((relative_error(grads, oracle), relative_error(expected, oracle)))
        ours, stocks = (sum(error) for error in zip(*errors, strict=True))
        assert ours <= EXACT * stocks


WAYS: dict[str, tuple[Any, float]] = {
    # devices without a kernel of ours use this
    "recomputed": (CompressionConfig(attention_variant="recomputed"), 1e-5),
    "checkpointed": (CompressionConfig(checkpoint="every:1", checkpoint_attention="kept"), 1e-5),
    "leaf by leaf": (CompressionConfig(plans=False), 1e-5),
    "int8": ("int8", 0.05),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", [FAMILIES[1], FAMILIES[4]], ids=lambda family: family.name)
def test_padding_in_other_ways_to_train(way: str, family: Family, small: list[int]) -> None:
    config, tolerance = WAYS[way]
    stock, batch = family.build(), padded(family.make_batch())
    expected = {name: grad.double() for name, grad in step(stock, batch)[1].items()}
    assert relative_error(step(patch_model(stock, config), batch)[1], expected) < tolerance and not small


@families
def test_other_calls_get_stocks_mask(family: Family, small: list[int]) -> None:
    """Such calls are packed rows with a cache, rows shorter than the window, and calls without gradients."""
    stock = family.build(torch.bfloat16, **{"use_cache": True})
    ours = patch_model(copy.deepcopy(stock), BODY)
    plain = family.make_batch()
    short = {name: x[:, :3].contiguous() for name, x in plain.items()}
    batches = [short] if family.task == "masked" else [packed(rows()), short]
    for batch in batches:
        expected, found = step(stock, batch), step(ours, batch)
        assert torch.equal(found[0], expected[0])
    with torch.no_grad():
        assert torch.equal(ours(**plain).logits, stock(**plain).logits)


@pytest.mark.daily(3)
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("family", [BY_NAME["mistral"], GEMMA3, LLAMA4, MODERNBERT], ids=lambda family: family.name)
def test_memory_grows_with_the_tokens(family: Family, padding: bool) -> None:
    """Measures the largest block of memory in steps of 1,024 and 2,048 tokens. Stock's mask grows four times."""
    reach = {"sliding_window": 64, "attention_chunk_size": 64, "local_attention": 64}
    options = {name: 64 for name in reach if name in family.options}
    sizes = []
    for config in (None, "exact", CompressionConfig(checkpoint="every:1", checkpoint_attention="kept")):
        model = build(family, "fp32", max_position_embeddings=2048, **options)
        if config is not None:
            patch_model(model, config)
        for length in (1024, 2048):
            ids = torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(0))
            batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
            batch["attention_mask"][:, -100:] = 0 if padding else 1
            sizes.append(watched_step(model, batch, "fp32")[2])
    assert sizes[1] == 4 * sizes[0] >= 4 * 1024**2
    for once, twice in (sizes[2:4], sizes[4:6]):
        assert twice <= 2 * once and twice < sizes[1] / 4


@pytest.mark.daily(2)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("family", [BY_NAME["mistral"], MODERNBERT], ids=lambda family: family.name)
def test_an_estimate_makes_no_mask(device: str, family: Family) -> None:
    config = family.make_config(sliding_window=64, max_position_embeddings=4096)
    once, twice = (
        estimate(config, batch_size=1, seq_len=n, config=BODY, dtype="bfloat16", device=device).step_peak_bytes
        for n in (2048, 4096)
    )
    assert twice <= 2.05 * once
