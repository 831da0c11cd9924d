"""Caches of keys and values: known by their type and by what code reads off them, whatever an argument's name is."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers import DynamicCache

from hf_actcompress import CompressionConfig, patch_model, patch_report
from hf_actcompress.models.arguments import cache_in
from hf_actcompress.modules.base import stock_type
from tests.families import BY_NAME, oracle_step, relative_error, step
from tests.layers.plans import LEAVES, PLANS, assert_same, calls, kept_bytes, pair, patched
from tests.oracle import EXACT


def cache_name(layer: Any) -> str:
    """The argument of a layer that takes the cache. Its name changes with transformers' releases."""
    names = inspect.signature(stock_type(layer).forward).parameters
    return next(name for name in names if name in ("past_key_values", "past_key_value", "layer_past", "cache"))


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "gpt2-gelu-new"])
def test_layers_run_by_plans_with_the_configs_cache(name: str) -> None:
    """The models' own defaults: a cache is made and filled in training."""
    stock, plans = pair(name, use_cache=True)
    batch = BY_NAME[name].make_batch()
    assert_same(plans, stock, batch)
    assert calls(plans) == [1, 1]
    assert not [row.note for row in patch_report(plans).patched if "module by module" in row.note]
    assert cache_in(plans(**batch).to_tuple()) is not None


def test_nothing_else_is_taken_for_a_cache() -> None:
    assert cache_in([None, (torch.ones(1),), {"cache": torch.ones(1)}, 3]) is None


def called_by_itself(config: CompressionConfig | None, filled: bool) -> tuple[Any, list[Tensor], list[Tensor]]:
    """A model whose first layer was called, with what that returned and cached, and its gradients."""
    model = patched(BY_NAME["llama"].build(), config)
    layer = model.model.layers[0]
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    angles = model.model.rotary_emb(x, torch.arange(7)[None])
    cache = DynamicCache()
    if filled:
        cache.update(torch.ones(2, 2, 3, 8), torch.ones(2, 2, 3, 8), 0)
    y = layer(x, position_embeddings=angles, attention_mask=None, **{cache_name(layer): cache})
    y = y[0] if isinstance(y, tuple) else y
    assert cache.get_seq_length() == (10 if filled else 7)
    gradients = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    return model, [y, cache.layers[0].keys, cache.layers[0].values], list(gradients)


@pytest.mark.parametrize("filled", [False, True])
def test_a_layer_that_is_called_by_itself_with_a_cache(filled: bool) -> None:
    """Under the name of this release: empty, it is filled by a plan; with keys in it, the layer's parts run."""
    (_, expected, stock), (_, _, leaves), (model, found, gradients) = (
        called_by_itself(config, filled) for config in (None, LEAVES, PLANS)
    )
    assert calls(model)[0] == (not filled)
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, gradients, leaves if filled else stock))
    torch.testing.assert_close(gradients, stock)


def test_keys_and_values_in_tuples_are_not_overlooked() -> None:
    """A layer that is called with the caches of old releases is left to its own code, which refuses them."""
    model = patch_model(BY_NAME["llama"].build())
    layer = model.model.layers[0]
    name = cache_name(layer)
    x = torch.randn(2, 7, 32).requires_grad_()
    angles = model.model.rotary_emb(x, torch.arange(7)[None])
    with pytest.raises(AttributeError):
        layer(x, position_embeddings=angles, attention_mask=None, **{name: (torch.ones(1), torch.ones(1))})
    assert calls(model)[0] == 0


def test_a_second_step_makes_a_new_cache() -> None:
    model = patch_model(BY_NAME["llama"].build(use_cache=True))
    batch = BY_NAME["llama"].make_batch()
    (first, grads), (second, again) = step(model, batch), step(model, batch)
    assert torch.equal(first, second) and all(torch.equal(grads[name], x) for name, x in again.items())


_SMALL: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
HYBRIDS: dict[str, Any] = {
    "qwen3_next": (
        "Qwen3Next",
        {**_SMALL, **_LINEAR, "num_experts": 0, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "lfm2": ("Lfm2", {**_SMALL, "layer_types": ["conv", "full_attention"]}),
    # later layers read the keys and values of earlier ones, through a dictionary
    "gemma4": (
        "Gemma4",
        {
            **_SMALL,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
}


def hybrid(name: str, config: CompressionConfig | None) -> Any:
    kind, options = HYBRIDS[name]
    torch.manual_seed(0)
    config_class = getattr(hf, f"{kind}TextConfig", None) or getattr(hf, f"{kind}Config")
    model = getattr(hf, f"{kind}ForCausalLM")(config_class(**options)).train()
    return model if config is None else patch_model(model, config)


def contents(cache: Any) -> list[dict[str, Any]]:
    """What each part of a cache holds, tensors by their bits."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return value.tolist() if isinstance(value, Tensor) else value

    return [{"kind": type(layer), **plain(vars(layer))} for layer in cache.layers]


def assert_no_larger_errors(ours: Any, stock: Any, length: int) -> None:
    """Over some batches: one alone may be off by an eighth either way."""
    errors = torch.zeros(2)
    for _ in range(6):
        ids = torch.randint(3, 67, (2, length))
        batch = {"input_ids": ids, "labels": ids}
        oracle = oracle_step(stock, batch)
        (loss, grads), (expected, theirs) = step(ours, batch), step(stock, batch)
        assert torch.equal(loss, expected)
        errors += torch.tensor([relative_error(grads, oracle), relative_error(theirs, oracle)])
    assert errors[0] <= EXACT * errors[1]


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_states_of_linear_attention_and_convolutions_are_cached(name: str) -> None:
    """The configs' default, `use_cache=True`: plans run, for any lengths, and the cache holds what stock's holds."""
    if not hasattr(hf, f"{HYBRIDS[name][0]}ForCausalLM"):
        pytest.skip("this transformers has no such model")
    stock, plans, leaves = (hybrid(name, config) for config in (None, PLANS, LEAVES))
    for length in (9, 12):
        batch = {"input_ids": torch.randint(3, 67, (2, length))}
        batch["labels"] = batch["input_ids"]
        if name != "gemma4":
            assert_same(plans, stock, batch)
        else:
            # the norm behind its layers is no plan, and rounds otherwise
            assert_no_larger_errors(plans, stock, length)
        found, expected = (cache_in(model(**batch).to_tuple()) for model in (plans, stock))
        assert contents(found) == contents(expected)
    assert calls(plans) == [14 if name == "gemma4" else 4] * len(calls(plans))
    batch = {"input_ids": torch.randint(3, 67, (2, 64))}
    batch["labels"] = batch["input_ids"]
    assert kept_bytes(plans, batch) <= kept_bytes(leaves, batch)


def test_a_filled_cache_of_states_is_left_to_the_layers_own_code() -> None:
    stock, plans = hybrid("lfm2", None), hybrid("lfm2", PLANS)
    ids = torch.randint(3, 67, (2, 9))
    for model in (plans, stock):
        name = next(iter(set(inspect.signature(model.forward).parameters) & {"cache", "past_key_values"}))
        model.cached = {name: cache_in(model(input_ids=ids[:, :5]).to_tuple())}
    logits = [model(input_ids=ids[:, 5:], **model.cached).logits for model in (plans, stock)]
    assert torch.equal(*logits)
    assert calls(plans) == [1, 1]


class Block(nn.Module):
    """A block that is told by the call which part of the cache is its own (Zamba)."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, index: int, cache: Any) -> Tensor:
        key, value = cache.update(self.key(x)[:, None], x[:, None], index)
        return x + self.out((key * value).sum(1))  # type: ignore[no-any-return]


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x: Tensor) -> tuple[Tensor, DynamicCache]:
        cache = DynamicCache()
        for i, block in enumerate(self.blocks):
            x = block(x, i, cache)
        return x.square().mean(), cache


def test_the_index_of_a_layer_may_be_an_argument_of_its_call() -> None:
    torch.manual_seed(0)
    stock = Blocks().train()
    ours = patch_model(copy.deepcopy(stock))
    x = torch.randn(2, 5, 8)
    for model in (stock, ours):
        model.loss, model.cache = model(x)
        model.loss.backward()
    assert calls(ours) == [1, 1, 1] and torch.equal(ours.loss, stock.loss)
    assert contents(ours.cache) == contents(stock.cache)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), stock.parameters(), strict=True))
