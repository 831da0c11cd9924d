"""Graphs of codecs under Inductor on a CPU: they are called, so that equal tensors of all layers share one graph."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch._inductor.utils import run_and_get_code

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.compilation import packing
from tests.families import BY_NAME, Family, differing, relative_error, step
from tests.integration.compiling import Gated, build, three, with_calls

pytestmark = pytest.mark.daily(3)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@three
@pytest.mark.parametrize("preset", ["int8", "int4"])
def test_further_layers_add_no_graph(family: Family, preset: str) -> None:
    """There are more calls, of the graphs that the first layers call; backward has none."""
    number, distinct = [], []
    for layers in (2, 4):
        key = "n_layer" if family.name.startswith("gpt2") else "num_hidden_layers"
        model = patch_model(build(family, **{key: layers}), preset)
        compiled, calls = with_calls(model)
        step(compiled, family.make_batch("right"))
        number.append([len(graph) for graph in calls])
        distinct.append([len({node.args[1] for node in graph}) for graph in calls])
    (few, *backward), (many, *further) = number
    assert 0 < distinct[0][0] == distinct[1][0] < few < many
    assert backward == further == [0]


def test_called_graphs_can_be_cached() -> None:
    """Their code names modules and functions, which torch finds again, and no string, which torch 2.11 refuses."""
    compiled, calls = with_calls(patch_model(Gated(), "int8"))
    compiled(torch.randn(4, 64, requires_grad=True)).sum().backward()
    call = calls[0][0]
    named = getattr(call.graph.owning_module, call.args[1]).graph.python_code("self").globals
    assert named
    assert not [name for name, value in named.items() if isinstance(value, str)]


def _functions(model: nn.Module, batch: dict[str, Any]) -> list[str]:
    """The C++ functions that Inductor's forward calls, in order; those of called graphs are not among them."""
    torch._dynamo.reset()
    with inductor.patch(force_disable_caches=True):
        _, (forward, *_) = run_and_get_code(torch.compile(model, fullgraph=True), **batch)
    text = forward[forward.index("class Runner") :]
    return re.findall(r"^ +(cpp_fused\w*)\(", text, re.M)


@three
def test_calls_split_no_function(family: Family) -> None:
    """The forward has as many functions as without a codec, and no more kinds.

    The vocabulary is so large that the peak is where the logits are: if it is inside of a layer, Inductor may find
    another order of all operations better.
    """
    model, batch = patch_model(build(family, vocab_size=2048)), family.make_batch("right")
    exact, coded = _functions(model, batch), _functions(patch_model(model, "int8"), batch)
    assert len(coded) == len(exact) and len({*coded}) <= len({*exact})


@three
@pytest.mark.parametrize("preset", ["int8", "int4"])
def test_a_call_returns_what_the_nodes_do(family: Family, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, also in the second step."""
    model, batch = patch_model(build(family), preset), family.make_batch("right")
    compiled, calls = with_calls(model)
    found = [step(compiled, batch) for _ in range(2)]
    assert calls[0]
    monkeypatch.setattr(packing, "can_call", lambda traced: False)
    compiled, calls = with_calls(model)
    expected_loss, expected = step(compiled, batch)
    assert not any(calls)
    for loss, grads in found:
        assert torch.equal(loss, expected_loss) and not differing(grads, expected)


@pytest.mark.parametrize("preset", ["int8", "int4"])
def test_gradients_are_as_close_to_fp64_as_of_copied_nodes(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call packs values that are rounded to bf16, where copied nodes may be fused into the op that makes them."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Gated(64), Gated(64)).bfloat16(), torch.randn(512, 64).bfloat16()
    exact = nn.Sequential(Gated(64), Gated(64)).double()
    exact.load_state_dict(model.state_dict())
    oracle = _gradients(exact, x.double())
    called = relative_error(_gradients(torch.compile(patch_model(model, preset), fullgraph=True), x), oracle)
    torch._dynamo.reset()
    monkeypatch.setattr(packing, "can_call", lambda traced: False)
    with inductor.patch(force_disable_caches=True):
        copied = relative_error(_gradients(torch.compile(model, fullgraph=True), x), oracle)
    assert 0 < called <= 1.1 * copied


def _gradients(model: Any, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return {name.removeprefix("_orig_mod."): p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("case", ["any length", "cpp_wrapper", "stochastic"])
def test_where_nodes_are_copied(case: str) -> None:
    """A graph for any length, Inductor's own wrapper in C++, and a codec that draws have no calls."""
    family = BY_NAME["llama"]
    config = CompressionConfig(mlp="int4_stochastic") if case == "stochastic" else "int8"
    compiled, calls = with_calls(patch_model(build(family), config), dynamic=case == "any length" or None)
    with inductor.patch(cpp_wrapper=case == "cpp_wrapper"):
        step(compiled, family.make_batch())
    assert calls and not any(calls)
