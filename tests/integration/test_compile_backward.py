"""Backward graphs under Inductor: logits are made a few columns at a time, weights' gradients where they cost least."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

from hf_actcompress import patch_model
from hf_actcompress.compilation import logits, ordering, partition
from hf_actcompress.compilation.observation import observed
from hf_actcompress.models import heads
from tests.families import BY_NAME, Gradients, differing, relative_error, step
from tests.integration.compiling import build

pytestmark = pytest.mark.daily(8)

VOCABULARY = 1000
GEMMA2 = replace(BY_NAME["gemma"], name="gemma2", config="Gemma2Config", model="Gemma2ForCausalLM")
BF16, FP32 = torch.bfloat16, torch.float32
CASES = [
    ("llama", BF16, None), ("llama", FP32, True), ("gpt2-gelu-tanh", FP32, None), ("bert", BF16, None),
    ("gemma2", FP32, None),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    # no logits are so few that they are kept
    monkeypatch.setattr(heads, "KEPT_BYTES", 0)


class _Nobody:
    """Watches nothing."""

    def fused(self) -> Any:
        return nullcontext()

    def returned(self, x: Tensor, module: str) -> None:
        return None


def _compiled(model: nn.Module, dynamic: bool | None = None) -> Any:
    """Inductor's graphs, run op by op."""
    torch._dynamo.reset()
    model.zero_grad(set_to_none=True)
    return torch.compile(model, backend=observed(model, _Nobody()), fullgraph=True, dynamic=dynamic)


def _whole_products(graph: Graph, rows: int) -> int:
    """Products that make all of the logits."""
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return sum(n.target in products and n.meta["val"].shape == (rows, VOCABULARY) for n in graph.nodes)


def _step(
    model: nn.Module, batch: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, large: int, dynamic: bool | None = None
) -> tuple[Tensor, Gradients, int]:
    """Loss, gradients, and how many products make whole logits in backward."""
    seen: list[int] = []

    def watch(graph: Graph) -> None:
        logits.divide_logits(graph)
        seen.append(_whole_products(graph, batch["input_ids"].numel()))

    monkeypatch.setattr(logits, "LARGE", large)
    monkeypatch.setattr(partition, "divide_logits", watch)
    loss, grads = step(_compiled(model, dynamic), batch)
    return loss, {name.removeprefix("_orig_mod."): grad for name, grad in grads.items()}, seen[0]


@pytest.mark.parametrize(("name", "dtype", "dynamic"), CASES)
def test_no_product_makes_them_whole(
    name: str, dtype: torch.dtype, dynamic: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tied heads, heads with a bias, softcaps, padding; gradients as close to fp64 as those of whole logits."""
    family = GEMMA2 if name == "gemma2" else BY_NAME[name]
    model, exact = (build(family, d, vocab_size=VOCABULARY) for d in (dtype, torch.float64))
    exact.load_state_dict(model.state_dict())
    batch = family.make_batch("right")
    oracle = step(exact, batch)[1]
    patch_model(model)
    whole_loss, whole, products = _step(model, batch, monkeypatch, large=2**62, dynamic=dynamic)
    assert products == 1
    loss, grads, products = _step(model, batch, monkeypatch, large=1, dynamic=dynamic)
    assert products == 0 and torch.equal(loss, whole_loss)
    assert relative_error(grads, oracle) <= 1.1 * relative_error(whole, oracle) + 1e-7


def test_a_result_that_is_read_before_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits stay whole, and the gradients what they were."""
    find = logits._sinks

    def weight_last(node: Any) -> Any:
        sinks = find(node)
        for product in [sink for kind, sink, _ in sinks or () if kind == "weight"]:
            next(iter(reversed(node.graph.nodes))).prepend(product)
        return sinks

    monkeypatch.setattr(logits, "_sinks", weight_last)
    # nothing waits for the product that is moved
    monkeypatch.setattr(partition, "order_weights", lambda graph: None)
    model, batch = patch_model(BY_NAME["llama"].build(vocab_size=VOCABULARY)), BY_NAME["llama"].make_batch()
    _, whole, _ = _step(model, batch, monkeypatch, large=2**62)
    _, grads, products = _step(model, batch, monkeypatch, large=1)
    assert products == 1 and not differing(grads, whole)


class _Twice(nn.Module):
    """A second loss, outside of the model, on the logits that it returned."""

    def __init__(self, model: nn.Module, reduce: bool) -> None:
        super().__init__()
        self.model, self.reduce = model, reduce

    def forward(self, **batch: Tensor) -> Any:
        output = self.model(**batch)
        x = output.logits.float()
        # a sum over the whole vocabulary of what has been made of it cannot be had of a few columns
        own = (x - x.softmax(-1).square().sum(-1, keepdim=True)).tanh() if self.reduce else x.tanh()
        output.loss = output.loss + own.mean()
        return output


@pytest.mark.parametrize("reduce", [False, True])
def test_a_second_loss(reduce: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pointwise: in pieces, too. What is not: the logits stay whole. The same gradients both ways."""
    family = BY_NAME["llama"]
    model, batch = _Twice(patch_model(family.build(vocab_size=VOCABULARY)), reduce), family.make_batch()
    _, whole, _ = _step(model, batch, monkeypatch, large=2**62)
    _, grads, products = _step(model, batch, monkeypatch, large=1)
    assert products == (1 if reduce else 0)
    assert relative_error(grads, {name: g.double() for name, g in whole.items()}) < 1e-6


@pytest.mark.parametrize("name", ["llama", "gpt2-gelu-tanh", "bert"])
def test_gradients_of_weights_come_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads the gradient of an input that is recomputed waits for that of one weight; the same bits.

    Backward computes three inputs of each layer again: those of all linear layers but the one behind attention.
    """
    model, batch = patch_model(build(BY_NAME[name])), BY_NAME[name].make_batch("right")
    monkeypatch.setattr(partition, "order_weights", lambda graph: None)
    expected_loss, expected = step(_compiled(model), batch)
    waits = _waits(monkeypatch)
    loss, grads = step(_compiled(model), batch)
    assert torch.equal(loss, expected_loss) and not differing(grads, expected)
    heads = 2 if name == "bert" else 1
    assert len(waits) == 3 * model.config.num_hidden_layers + heads


def _waits(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list that fills with the nodes that wait for a weight's gradient, whenever a graph is ordered."""
    waits: list[Any] = []

    def watch(graph: Graph) -> None:
        ordering.order_weights(graph)
        graph.lint()
        waits.extend(n for n in graph.nodes if n.target is torch.ops.aten.where.self and n.args[1] is n.args[2])

    monkeypatch.setattr(partition, "order_weights", watch)
    return waits


@pytest.mark.parametrize(("tokens", "awaited"), [(64, 1), (2, 0)])
def test_a_gradient_that_is_larger_than_its_factors(tokens: int, awaited: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The down projection has a weight of 256 elements, and 40 elements per token in its input and output."""
    model, waits = patch_model(nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 8))), _waits(monkeypatch)
    _compiled(model)(torch.randn(tokens, 8)).square().sum().backward()
    assert len(waits) == awaited


class _TwoMLPs(nn.Module):
    """Both down projections have the same gradient of their outputs, and the input of the second one is narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.ModuleList([nn.Linear(8, 32), nn.Linear(8, 8)]), nn.ModuleList()
        self.down.extend([nn.Linear(32, 8), nn.Linear(8, 8)])
        self.act = nn.ModuleList([nn.SiLU(), nn.SiLU()])

    def forward(self, x: Tensor) -> Tensor:
        inner = [act(up(x)) for act, up in zip(self.act, self.up, strict=True)]
        y: Tensor = self.down[0](inner[0]) + self.down[1](inner[1])
        return y


def test_a_view_ahead_of_the_weights_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is viewed before the product that would come first stays where it is."""
    torch.manual_seed(0)
    model, x = patch_model(_TwoMLPs()), torch.randn(2, 5, 8)
    model(x).square().sum().backward()
    expected = [p.grad for p in model.parameters()]
    _waits(monkeypatch)
    _compiled(model)(x).square().sum().backward()
    assert all(torch.allclose(p.grad, g, atol=1e-5) for p, g in zip(model.parameters(), expected, strict=True))  # type: ignore[arg-type]
