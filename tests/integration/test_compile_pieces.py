"""Pieces of the vocabulary under Inductor on a CPU: they call one graph, which is compiled once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor
from torch._inductor.fx_passes import pad_mm
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule, Node

from hf_actcompress import patch_model
from hf_actcompress.compilation import logits
from hf_actcompress.compilation._backend import _as_it_is
from hf_actcompress.compilation.calls import graphs_for
from hf_actcompress.models import heads
from hf_actcompress.private_apis import compile_for_inductor
from tests.families import BY_NAME, Batch, Family, Gradients, relative_error
from tests.integration.compiling import build, three, with_calls

pytestmark = pytest.mark.daily(3)

# vocabularies that can and cannot be divided into equal pieces
EQUAL, ODD = 1000, 1003
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    # no logits are so few that they are kept
    monkeypatch.setattr(heads, "KEPT_BYTES", 0)


def _gradients(compiled: Any, batch: Batch) -> Gradients:
    """The caller reads the logits, too, so that their gradient that a graph is given is not zero."""
    compiled.zero_grad(set_to_none=True)
    output = compiled(**batch)
    (output.loss + output.logits.double().tanh().mean()).backward()
    grads = ((name.removeprefix("_orig_mod."), p.grad) for name, p in compiled.named_parameters())
    return {name: grad for name, grad in grads if grad is not None}


def _backward(
    model: nn.Module, batch: Batch, large: int, monkeypatch: pytest.MonkeyPatch, dynamic: bool | None = None
) -> tuple[list[Node], Gradients]:
    """The calls in backward, and the gradients, of Inductor's graphs that run op by op."""
    monkeypatch.setattr(logits, "LARGE", large)
    compiled, calls = with_calls(model, dynamic)
    grads = _gradients(compiled, batch)
    forward, backward = calls
    assert not forward
    return backward, grads


@three
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("vocabulary", "graphs"), [(EQUAL, 1), (ODD, 2)])
def test_pieces_share_graphs(
    family: Family, dtype: torch.dtype, vocabulary: int, graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tied heads, a head with a bias; gradients are as close to fp64 as those of whole logits."""
    model, exact = (build(family, d, vocab_size=vocabulary) for d in (dtype, torch.float64))
    exact.load_state_dict(model.state_dict())
    batch = family.make_batch("right")
    oracle = _gradients(exact, batch)
    patch_model(model)
    calls, whole = _backward(model, batch, 2**62, monkeypatch)
    assert not calls
    calls, grads = _backward(model, batch, 1, monkeypatch)
    assert len({node.args[1] for node in calls}) == graphs
    width = -(-vocabulary // len(calls))
    # a piece and its gradient are in memory at once: together they are smaller than one of two pieces
    assert 2 * width < vocabulary / 2
    assert relative_error(grads, oracle) <= 1.1 * relative_error(whole, oracle) + 1e-7


def test_further_pieces_add_no_kernel() -> None:
    """Inductor's code of 8 pieces has as many C++ functions as that of 16; its gradients are those of eager mode."""
    family, functions = BY_NAME["bert"], []
    for vocabulary, pieces in ((32_000, 8), (128_000, 16)):
        torch._dynamo.reset()
        model = patch_model(build(family, torch.float32, vocab_size=vocabulary, num_hidden_layers=1))
        batch = family.make_batch("right")
        eager = _gradients(model, batch)
        with inductor.patch(force_disable_caches=True):
            grads, codes = run_and_get_code(_gradients, torch.compile(model, fullgraph=True), batch)
        backward = codes[-1]
        called = [line for line in backward.splitlines() if "= actcompress_0(" in line]
        assert len(called) == pieces
        functions.append(backward.count("cpp_pybinding("))
        assert relative_error(grads, {name: g.double() for name, g in eager.items()}) < 1e-5
    assert functions[0] == functions[1]


@pytest.mark.parametrize("case", ["any length", "cpp_wrapper", "a frozen body"])
def test_where_nothing_is_called(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the pieces are made one by one, with gradients that are those of whole logits."""
    family = BY_NAME["llama"]
    model = patch_model(build(family, torch.float32, vocab_size=EQUAL))
    if case == "a frozen body":
        model.model.requires_grad_(False)
    with inductor.patch(cpp_wrapper=case == "cpp_wrapper"):
        dynamic = case == "any length" or None
        _, whole = _backward(model, family.make_batch(), 2**62, monkeypatch, dynamic)
        calls, grads = _backward(model, family.make_batch(), 1, monkeypatch, dynamic)
    assert not calls
    assert relative_error(grads, {name: g.double() for name, g in whole.items()}) < 1e-6


@three
def test_products_that_a_gpu_pads(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor pads products for a vocabulary that is no multiple of 8. The pieces are made of what was padded."""
    monkeypatch.setattr(logits, "LARGE", 1)
    for name in ("check_device", "has_triton"):
        monkeypatch.setattr(pad_mm, name, lambda *_: True)
    model, exact = (build(family, d, vocab_size=ODD) for d in (torch.bfloat16, torch.float64))
    exact.load_state_dict(model.state_dict())
    batch, sizes = family.make_batch("right"), []

    def look(graph: GraphModule, inputs: list[Any], **options: Any) -> Any:
        products = (node for node in graph.graph.nodes if node.target in PRODUCTS)
        sizes.append([tuple(node.meta["val"].shape) for node in products])
        return _as_it_is(graph, inputs)

    errors, truth = [], _gradients(exact, batch)
    with graphs_for("cuda"), inductor.patch(force_shape_pad=True):
        for prepare in (lambda model: model, patch_model):
            torch._dynamo.reset()
            compiled = torch.compile(prepare(model), backend=compile_for_inductor(look), fullgraph=True)
            errors.append(relative_error(_gradients(compiled, batch), truth))
    # stock's forward and backward, then ours: backward has no product of the vocabulary's size, padded or not
    assert [max(map(max, products)) for products in sizes[:3]] == [ODD + 5] * 3
    assert max(map(max, sizes[3])) < ODD / 4
    assert errors[1] <= 1.1 * errors[0] + 1e-7
