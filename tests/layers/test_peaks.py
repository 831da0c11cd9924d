"""What plans hold while they run: calls write in place, the backward's order keeps the peak low, estimates see it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hf_actcompress import estimate, kept_bytes, measure_step, patch_model
from hf_actcompress.graphs import code
from hf_actcompress.graphs.code import forward_code
from hf_actcompress.graphs.ordering import lower_peak
from tests.layers.plans import assert_all_ran, by_plans
from tests.slopes import VOCAB, bert, gpt2, llama

BATCH, LENGTH = 2, 128
MODELS = pytest.mark.parametrize("build", [bert, gpt2, llama])


def peak(model: Any, length: int = LENGTH, head: bool = True) -> int:
    """Bytes at the peak of a step, with or without the head, after one that makes the plans."""
    ids = torch.randint(3, VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(0))

    def run() -> None:
        torch.manual_seed(1)
        if head:
            model(input_ids=ids, labels=ids).loss.backward()
        else:
            model.base_model(input_ids=ids)[0].square().mean().backward()

    run()
    assert_all_ran(model)
    return measure_step(run, "cpu").peak_bytes


def gradients(model: Any) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_writing_in_place_lowers_the_peak_and_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = llama(2, 128).train()
    ours, plain = (patch_model(copy.deepcopy(model), by_plans("exact")) for _ in range(2))
    # with so many tokens, activations are larger than weights
    low = peak(ours, 512, head=False)
    monkeypatch.setattr(code, "written_over", lambda graph, results: {})
    assert low < peak(plain, 512, head=False)
    assert all(map(torch.equal, gradients(ours), gradients(plain)))


VIEWS = {
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(0, 2, 1),
    "complex": lambda x: torch.view_as_complex(x.view(4, 2, 2)),
    "split": lambda x: x.split(2)[1],
    "transposed": lambda x: x.t().unsqueeze(0),
    "strided": lambda x: x.as_strided((2, 2), (1, 1)),
    "another dtype": lambda x: x.view(torch.int32).float(),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_nothing_is_written_over_while_a_view_of_it_is_read(view: Any) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        made = x.exp()
        shown = view(made)
        # the last call that reads `made` itself
        doubled = made * 2
        return doubled.sum() + shown.abs().sum()

    x = torch.linspace(-1, 1, 16).view(4, 4)
    graph = make_fx(function, tracing_mode="fake")(x).graph
    inputs, results = graph.find_nodes(op="placeholder"), list(graph.find_nodes(op="output")[0].all_input_nodes)
    assert torch.equal(forward_code(graph, inputs, results, [])(x)[0], function(x))


def test_a_call_that_frees_what_it_reads_comes_first() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        one, two = x.exp(), x.sin()
        return one.sum() + two.sum()

    module = make_fx(function, tracing_mode="fake")(torch.ones(1000))
    names = [node.name for node in module.graph.nodes if node.op == "call_function"]
    assert names == ["exp", "sin", "sum_1", "sum_2", "add"]
    # a backward that begins with the forward has placeholders between its calls
    x, _, second, *_ = module.graph.nodes
    with module.graph.inserting_before(second):
        second.replace_input_with(x, other := module.graph.placeholder("other"))
    other.meta = dict(x.meta)
    lower_peak(module.graph, set())
    module.graph.lint()
    module.recompile()
    names = [node.name for node in module.graph.nodes if node.op == "call_function"]
    assert names == ["exp", "sum_1", "sin", "sum_2", "add"]
    assert torch.equal(module(torch.ones(1000), torch.ones(1000)), function(torch.ones(1000)))


@MODELS
@pytest.mark.parametrize("preset", ["exact", "int8"])
def test_an_estimate_runs_the_plans(build: Any, preset: str) -> None:
    torch.manual_seed(0)
    model = build(2, 128).train()
    said = estimate(model, batch_size=BATCH, seq_len=LENGTH, config=by_plans(preset), device="cpu")
    patch_model(model, by_plans(preset))
    highest = peak(model)
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH))
    assert said.kept_bytes == kept_bytes(lambda: model(input_ids=ids, labels=ids).loss, "cpu")
    assert said.step_peak_bytes == pytest.approx(highest, rel=0.05)
