"""A program's backward runs in stages: its peak does not hold all of its gradients, and every layer is a program."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hf_actcompress import CompressionConfig
from hf_actcompress.layers import handing, stages
from hf_actcompress.layers import layer as layer_module
from hf_actcompress.memory.measurement.allocator import allocator_trace
from tests.layers.plans import LEAVES, PLANS, calls, patched

HIDDEN = 256


def llama(config: CompressionConfig | None, checkpointed: bool = False) -> Any:
    torch.manual_seed(0)
    options = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 32, "use_cache": False}
    model = LlamaForCausalLM(LlamaConfig(hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, **options))
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return patched(model, config)


def gpt2(config: CompressionConfig | None, checkpointed: bool = False) -> Any:
    torch.manual_seed(0)
    sizes = {"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "vocab_size": 32, "n_positions": 512}
    dropouts = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, use_cache=False)).train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return patched(model, config)


def batch(tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 32, (1, tokens), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def hooked(model: Any) -> None:
    def use_up(p: Any) -> None:
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(use_up)


def accumulated(model: Any) -> None:
    model(**batch(8)).loss.backward()


def assert_stocks_in_accumulation(run: Callable[[Any], list[Any]]) -> None:
    """`run` returns the same bits for stock and for a model by plans, both in the second step of an accumulation."""
    results = []
    for config in (None, PLANS):
        model = llama(config)
        accumulated(model)
        results.append(run(model))
    assert all(map(torch.equal, *results))


CASES: dict[str, Callable[[Any], None]] = {"in the second backward": accumulated, "hooks on the weights": hooked}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tokens", (8, 100, 400))
@pytest.mark.parametrize("way", ("whole", "checkpointed"))
def test_the_peak_is_that_of_the_leaf_path_and_gradients_are_stocks(
    case: str, tokens: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "SLACK", 2**16)
    peaks, gradients = [], []
    models = [llama(config, way == "checkpointed") for config in (None, PLANS, LEAVES)]
    for model in models:
        CASES[case](model)
        loss = model(**batch(tokens)).loss
        peaks.append(allocator_trace(loss.backward).peak_bytes)
        gradients.append([p.grad for p in model.parameters()])
    # gradients of norms and of small products may exist together
    assert peaks[1] <= peaks[2] + 4 * max(stages.SLACK, 4 * tokens * HIDDEN)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*gradients[:2], strict=True))
    assert calls(models[1]) == [1 + (case == "in the second backward")] * 2


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("checkpointed", (False, True))
def test_the_peak_with_the_slack_as_it_is(case: str, checkpointed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are so wide that a backward stops. Without stops, plans would peak 4 to 9 MiB higher."""
    monkeypatch.setattr(sys.modules[__name__], "HIDDEN", 512)
    peaks, linked = [], []
    for config in (LEAVES, PLANS):
        model = llama(config, checkpointed)
        CASES[case](model)
        monkeypatch.setattr(layer_module, "Stages", lambda *args: linked.append(args) or stages.Stages(*args))
        loss = model(**batch(256)).loss
        peaks.append(allocator_trace(loss.backward).peak_bytes)
    assert len(linked) == 2
    # gradients of norms may exist together
    assert peaks[1] <= peaks[0] + 2**16


@pytest.mark.parametrize("checkpointed", (False, True))
def test_what_an_activation_shares_with_its_derivative_is_not_held_meanwhile(
    checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2's activation is a chain of ops, each as wide as the MLP. Its backward holds two such tensors more than the
    formula of the leaf path does."""
    monkeypatch.setattr(stages, "SLACK", 2**16)
    peaks, tokens = [], 400
    for config in (LEAVES, PLANS):
        model = gpt2(config, checkpointed)
        accumulated(model)
        peaks.append(allocator_trace(model(**batch(tokens)).loss.backward).peak_bytes)
    wide = 4 * tokens * 4 * HIDDEN
    assert peaks[1] <= peaks[0] + 2 * wide


def test_a_backward_stops_for_all_but_the_last_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a slack of zero, the gradients that exist at once are never more than the largest one."""
    monkeypatch.setattr(stages, "SLACK", 0)
    found, stops_of = [], stages.stops_of
    monkeypatch.setattr(layer_module, "stops_of", lambda *args: found.append(stops_of(*args)) or found[-1])
    model = llama(PLANS)
    model(**batch(8)).loss.backward()
    assert found and not any(found)
    model(**batch(8)).loss.backward()
    weights = [name.removesuffix(".weight") for name, _ in model.model.layers[0].named_parameters()]
    names = [[weights[i].rpartition(".")[2] for i in stop] for stop in found[-1]]
    # gradients of attention and norms come together, because they are no more than one of the MLP
    assert names[:3] == [["down_proj"], ["up_proj"], ["gate_proj"]]
    assert names[3:] == [["post_attention_layernorm", "o_proj", "v_proj", "k_proj"]]


def test_nothing_is_left_without_a_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """No reference cycle goes through the nodes, which hold a graph."""
    monkeypatch.setattr(stages, "SLACK", 0)
    made: list[Any] = []
    linked = stages.Stages.linked

    def seen(self: Any, *args: Any) -> Any:
        made.append(weakref.ref(self))
        return linked(self, *args)

    monkeypatch.setattr(stages.Stages, "linked", seen)
    model = llama(PLANS, checkpointed=True)
    accumulated(model)
    gc.collect()
    gc.disable()
    try:
        model(**batch(8)).loss.backward()
        assert len(made) == 2 and all(reference() is None for reference in made)
    finally:
        gc.enable()


def test_gradients_of_single_weights_and_backwards_that_end_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine runs only the stages that it needs; the next backward starts from the beginning."""
    monkeypatch.setattr(stages, "SLACK", 0)

    def run(model: Any) -> list[Any]:
        layer = model.model.layers[1]
        loss = model(**batch(8)).loss
        found = []
        for wanted in (layer.mlp.down_proj, layer.mlp.gate_proj, layer.self_attn.q_proj, layer.input_layernorm):
            found += torch.autograd.grad(loss, [wanted.weight], retain_graph=True)
        loss.backward(inputs=[layer.mlp.up_proj.weight], retain_graph=True)
        loss.backward()
        return [*found, *(p.grad for p in model.parameters())]

    assert_stocks_in_accumulation(run)


def test_gradients_of_heads_are_let_go_of_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of a first backward is the leaf path's. Small gradients are held together, which is faster."""
    tokens, peaks = 100, []
    for slack, config in ((0, LEAVES), (0, PLANS), (2**40, PLANS)):
        monkeypatch.setattr(handing, "LARGE", slack)
        model = llama(config)
        model(**batch(tokens))
        peaks.append(allocator_trace(lambda model=model: model(**batch(tokens)).loss.backward()).peak_bytes)  # type: ignore[misc]
    one = 4 * tokens * HIDDEN
    assert peaks[1] < peaks[0] + one / 4 and peaks[2] > peaks[1] + one / 2


def test_two_backwards_through_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "SLACK", 0)

    def run(model: Any) -> list[Any]:
        loss = model(**batch(8)).loss
        loss.backward(retain_graph=True)
        loss.backward()
        wanted = list(model.parameters())
        again = torch.autograd.grad(model(**batch(8)).loss, wanted)
        return [*(p.grad for p in wanted), *again]

    assert_stocks_in_accumulation(run)
