"""A loss of a part of what a layer returns: parameters that get no gradient in stock get none here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, EncoderDecoderCache

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.layers import handing, stages
from tests.families import BY_NAME, cast_batch, differing, mode_of
from tests.layers.plans import DTYPES, MODES, PLANS

NAMES = ("llama", "gpt2-gelu-new", "gemma", "qwen3", "t5", "opt", "phi3")
CONFIGS = {
    "plans": PLANS,
    "module by module": CompressionConfig(plans=False),
    "nothing made again": CompressionConfig(selective=False),
    "long": "long",
}


def _caches(output: Any) -> list[Any]:
    found = [value for value in output.values() if isinstance(value, Cache)]
    assert found, "the model returned no cache"
    return [c for x in found for c in ((x.self_attention_cache, x.cross_attention_cache) if _is_both(x) else (x,))]


def _is_both(cache: Any) -> bool:
    return isinstance(cache, EncoderDecoderCache)


LOSSES: dict[str, Callable[[Any], Tensor]] = {
    "keys of the last layer": lambda o: _caches(o)[0].layers[-1].keys.float().square().mean(),
    "values of the last layer": lambda o: _caches(o)[-1].layers[-1].values.float().square().mean(),
    "keys and values of the first layer": lambda o: sum(
        x.float().square().mean() for c in _caches(o) for x in (c.layers[0].keys, c.layers[0].values)
    ),
    "hidden states between": lambda o: (
        (o.get("hidden_states") or o["decoder_hidden_states"])[1].float().square().mean()
    ),
    "keys and the loss": lambda o: _caches(o)[0].layers[-1].keys.float().square().mean() + o["loss"],
}


def _gradients(name: str, mode: str, config: Any, loss: str, accumulated: bool = False) -> dict[str, Tensor]:
    model = BY_NAME[name].build(DTYPES[mode], use_cache=True)
    if config is not None:
        patch_model(model, config)
    batch = cast_batch(BY_NAME[name].make_batch(), DTYPES[mode])
    found: dict[str, Tensor] = {}
    for _ in range(2 if accumulated else 1):
        with mode_of(mode):
            output = model(**batch, use_cache=True, output_hidden_states="hidden" in loss)
        LOSSES[loss](output).backward()
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return found


def _assert_as_stock(name: str, mode: str, config: str, loss: str, accumulated: bool = False) -> None:
    stock = _gradients(name, mode, None, loss, accumulated)
    ours = _gradients(name, mode, CONFIGS[config], loss, accumulated)
    assert ours.keys() == stock.keys()
    if config == "plans" and name != "t5":
        # each of T5's decoder layers first adds up its own gradients of the encoder's states
        assert not differing(ours, stock)
    rtol, atol = (1e-4, 1e-6) if mode == "fp32" else (3e-2, 3e-3)
    for parameter, gradient in stock.items():
        torch.testing.assert_close(
            ours[parameter], gradient, rtol=rtol, atol=atol, msg=lambda m, p=parameter: f"{p}: {m}"
        )


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.daily(4)
def test_no_gradient_stays_none(name: str, config: str, loss: str) -> None:
    _assert_as_stock(name, "fp32", config, loss)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("large", [False, True])
def test_in_each_precision_and_for_large_layers(
    mode: str, loss: str, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large layers hand gradients over past autograd, and return them in several stages where they accumulate."""
    if large:
        monkeypatch.setattr(handing, "LARGE", 1)
        monkeypatch.setattr(stages, "SLACK", 1)
    _assert_as_stock("llama", mode, "plans", loss, accumulated=True)


def test_weight_decay_leaves_what_stock_leaves() -> None:
    """Zeros in place of None would let AdamW's weight decay move weights."""
    moved = []
    for patched in (False, True):
        model = BY_NAME["llama"].build(use_cache=True)
        if patched:
            patch_model(model)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=1.0)
        LOSSES["keys of the last layer"](model(**BY_NAME["llama"].make_batch(), use_cache=True)).backward()
        optimizer.step()
        moved.append({n for n, p in model.named_parameters() if not torch.equal(p, before[n])})
    assert moved[0] == moved[1] != set()
