"""Caches of keys and values: known by their type and by what code reads off them, whatever an argument's name is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, FalconConfig, FalconForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

from hf_actcompress import patch_model, patch_report
from hf_actcompress.models.arguments import cache_in
from hf_actcompress.programs.arguments import cache_names
from tests.families import BY_NAME, step
from tests.programs.pairs import LEAVES, PROGRAMS, assert_same, calls, pair

_SIZES: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
}  # fmt: skip


def layers_of(model: nn.Module) -> list[Any]:
    kinds = "DecoderLayer", "Block", "GPTNeoXLayer"
    return [module for module in model.modules() if type(module).__name__.removeprefix("ActCompress").endswith(kinds)]


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "gpt2-gelu-new"])
def test_layers_run_as_programs_with_the_configs_cache(name: str) -> None:
    """The models' own defaults: a cache is made and filled in training."""
    model, programs = pair(name, use_cache=True)
    batch = BY_NAME[name].make_batch()
    assert_same(model, programs, batch)
    assert calls(programs) and all(calls(programs))
    assert not [row.note for row in patch_report(programs).patched if "module by module" in row.note]
    assert cache_in(programs(**batch).to_tuple()) is not None


@pytest.mark.parametrize(
    "model",
    [
        GPTNeoXForCausalLM(GPTNeoXConfig(**_SIZES)),
        FalconForCausalLM(FalconConfig(**_SIZES)),
        BY_NAME["llama"].build(),
        BY_NAME["gpt2-gelu-new"].build(),
        BY_NAME["t5"].build(),
    ],
    ids=lambda model: type(model).__name__,
)
def test_the_cache_is_found_in_the_code(model: nn.Module) -> None:
    """Layers call it layer_past, past_key_values or, since transformers 5.24, cache."""
    layers = layers_of(model)
    assert len(layers) >= 2
    for layer in layers:
        assert len(cache_names(layer)) == 1


class NoCache(nn.Module):
    def forward(self, x: Tensor, layers: int, **kwargs: Any) -> Tensor:
        kwargs.update(layers=layers)
        return x


def test_nothing_else_is_taken_for_a_cache() -> None:
    assert cache_names(NoCache()) == []
    assert cache_in([None, (torch.ones(1),), {"cache": torch.ones(1)}, 3]) is None


@pytest.mark.parametrize("filled", [False, True])
def test_a_layer_that_is_called_by_itself_with_a_cache(filled: bool) -> None:
    """Under the name of this release: empty, it is filled by a program; with keys in it, the layer's parts run."""
    found = []
    for config in (LEAVES, PROGRAMS):
        model = patch_model(BY_NAME["llama"].build(), config)
        layer = model.model.layers[0]
        (name,) = cache_names(layer)
        x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        angles = model.model.rotary_emb(x, torch.arange(7)[None])
        cache = DynamicCache()
        if filled:
            cache.update(torch.ones(2, 2, 3, 8), torch.ones(2, 2, 3, 8), 0)
        y = layer(x, position_embeddings=angles, attention_mask=None, **{name: cache})
        y = y[0] if isinstance(y, tuple) else y
        assert cache.get_seq_length() == (10 if filled else 7)
        found.append(
            (y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]), cache.layers[0].keys)
        )
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert calls(model)[0] == (not filled)


def test_keys_and_values_in_tuples_are_not_overlooked() -> None:
    """A layer that is called with the caches of old releases is left to its own code, which refuses them."""
    model = patch_model(BY_NAME["llama"].build())
    layer = model.model.layers[0]
    (name,) = cache_names(layer)
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
