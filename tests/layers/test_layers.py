"""Layers that run by plans: stock's bits in every gradient, and no more bytes than module by module."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_actcompress import patch_model, unpatch_model
from hf_actcompress.layers import stages
from hf_actcompress.memory.measurement.allocator import kept_bytes
from hf_actcompress.records import live_entries
from tests.families import BY_NAME, cast_batch, differing, step
from tests.layers.plans import DTYPES, LEAVES, MODES, PLANS, assert_same, calls, every_family, pair, patched


@pytest.mark.daily(3)
@every_family
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding", ("none", "right", "left"))
def test_the_same_bits(name: str, mode: str, padding: str) -> None:
    if padding not in BY_NAME[name].paddings:
        pytest.skip(f"{name} takes no padding")
    stock, plans = pair(name, DTYPES[mode])
    assert_same(plans, stock, BY_NAME[name].make_batch(padding), mode)
    assert calls(plans) == [1, 1] and live_entries() == 0


@every_family
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_no_more_bytes_than_module_by_module(name: str, dtype: torch.dtype) -> None:
    batch = cast_batch(BY_NAME[name].make_batch("none"), dtype)
    models = [patched(BY_NAME[name].build(dtype), config) for config in (LEAVES, PLANS)]
    kept = [kept_bytes(lambda model=model: model(**batch), "cpu") for model in models]  # type: ignore[misc]
    assert kept[1] <= kept[0]


def test_one_function_a_layer() -> None:
    _, plans = pair("llama")
    names: list[str] = []
    pending, seen = [plans(**BY_NAME["llama"].make_batch()).loss.grad_fn], set[Any]()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.append(type(node).__name__)
            pending += [parent for parent, _ in node.next_functions]
    assert names.count("PlanFunctionBackward") == len(plans.model.layers)
    # the layers leave no other node; the last norm and the head belong to no layer
    assert names.count("RMSNormFunctionBackward") == names.count("LinearFunctionBackward") == 1


FROZEN: dict[str, Callable[[str], bool]] = {
    "all but the norms": lambda name: "norm" not in name,
    "the norms": lambda name: "norm" in name,
    "the attention": lambda name: "self_attn" in name,
    "the MLP": lambda name: "mlp" in name,
    "one projection": lambda name: "k_proj" in name or "up_proj" in name,
    "the first layer": lambda name: "layers.0" in name or "embed" in name,
    "everything but one weight": lambda name: "layers.1.mlp.gate_proj" not in name,
}


@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_weights(frozen: str) -> None:
    stock, plans, leaves = models = [patched(BY_NAME["qwen3"].build(), config) for config in (None, PLANS, LEAVES)]
    for model in models:
        for name, p in model.named_parameters():
            p.requires_grad_(not FROZEN[frozen](name))
    assert_same(plans, stock, BY_NAME["qwen3"].make_batch("right"))
    batch = BY_NAME["qwen3"].make_batch()
    kept = [kept_bytes(lambda model=model: model(**batch), "cpu") for model in (plans, leaves)]  # type: ignore[misc]
    # where nothing else reads the input of a norm, a plan keeps it and a statistic, and not the norm's output
    statistics = 4 * batch["input_ids"].numel() if frozen == "everything but one weight" else 0
    assert kept[0] <= kept[1] + statistics


def test_backward_twice_and_accumulation() -> None:
    stock, plans = pair("llama")
    batch = BY_NAME["llama"].make_batch()
    grads = []
    for model in (stock, plans):
        loss = model(**batch).loss
        loss.backward(retain_graph=True)
        loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *grads))


def test_other_data_before_backward_and_writes() -> None:
    """Backward reads the weights of its forward, even if their parameters have other data by then."""
    stock, plans = pair("llama")
    batch = BY_NAME["llama"].make_batch()
    _, expected = step(stock, batch)
    loss, weights = plans(**batch).loss, [p.data for p in plans.parameters()]
    for p in plans.parameters():
        p.data = torch.zeros_like(p)
    loss.backward()
    assert not differing({name: p.grad for name, p in plans.named_parameters()}, expected)
    for p, data in zip(plans.parameters(), weights, strict=True):
        p.data = data
    loss = plans(**batch).loss
    with torch.no_grad():
        plans.model.layers[0].mlp.gate_proj.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("staged", (False, True))
@pytest.mark.parametrize("checkpointed", (False, True))
def test_no_second_derivatives_in_silence(checkpointed: bool, staged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test asks only for gradients of layers' weights, because the head's would raise the error in any case."""
    _, plans = pair("llama")
    if checkpointed:
        plans.gradient_checkpointing_enable({"use_reentrant": False})
    batch, layers = BY_NAME["llama"].make_batch(), plans.model.layers
    if staged:
        monkeypatch.setattr(stages, "SLACK", 0)
        plans(**batch).loss.backward()
    for layer in layers:
        grads = torch.autograd.grad(plans(**batch).loss, list(layer.parameters()), create_graph=True)
        for gradient in grads:
            with pytest.raises(RuntimeError, match="second derivatives"):
                gradient.sum().backward(retain_graph=True)
    assert calls(plans) == [2 + staged] * 2


@pytest.mark.parametrize("reentrant", (False, True))
def test_under_checkpointing(reentrant: bool) -> None:
    stock, plans = pair("llama")
    for model in (stock, plans):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    assert_same(plans, stock, BY_NAME["llama"].make_batch("right"))
    assert min(calls(plans)) > 0


def test_a_cache_that_is_empty() -> None:
    stock, plans = pair("llama")
    assert_same(plans, stock, {**BY_NAME["llama"].make_batch("right"), "use_cache": True})
    assert calls(plans) == [1, 1]


def test_copies_files_and_unpatching() -> None:
    stock, plans = pair("llama")
    batch = BY_NAME["llama"].make_batch()
    file = io.BytesIO()
    torch.save(plans, file)
    file.seek(0)
    for other in (copy.deepcopy(plans), torch.load(file, weights_only=False)):
        before = calls(other)[0]
        assert_same(other, stock, batch)
        assert calls(other)[0] == before + 1
    assert calls(plans) == [0, 0]
    assert [type(m) for m in unpatch_model(plans).modules()] == [type(m) for m in stock.modules()]


@every_family
def test_attention_dropout(name: str) -> None:
    stock, plans = pair(name, dropout=0.1)
    assert_same(plans, stock, BY_NAME[name].make_batch(BY_NAME[name].paddings[-1]))
    assert calls(plans) == [1, 1]


@pytest.mark.parametrize("dropout", (0.0, 0.1))
def test_patching_and_tracing_draw_no_random_number(dropout: float) -> None:
    """A trace does not move the generator: after a step it is where stock's step leaves it."""
    stock = BY_NAME["llama"].build(dropout=dropout)
    batch, states = BY_NAME["llama"].make_batch(), []
    for model in (stock, patch_model(copy.deepcopy(stock), PLANS)):
        torch.manual_seed(3)
        step(model, batch)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
