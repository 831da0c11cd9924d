"""Random numbers of graphs that Inductor compiles: masks of dropout, and codecs that round stochastically."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import inductor_prims as prims
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.fx import Graph

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.compilation.seeds import divide_seeds
from tests.integration.compile_worker import Block

pytestmark = pytest.mark.daily(6)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


class _Dropped(nn.Module):
    """Behind the dropout there is a product, so that backward reads the dropped tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(256))
        self.act, self.dropout, self.down = nn.SiLU(), nn.Dropout(0.5), nn.Linear(256, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        dropped = self.dropout(self.act(x + self.bias))
        return self.down(dropped).sum(), dropped


def test_backward_drops_what_forward_has_dropped() -> None:
    """Backward draws the same mask again, for the weight and for the input; the next step draws another one."""
    torch.manual_seed(0)
    model: Any = patch_model(_Dropped())
    compiled = torch.compile(model, fullgraph=True)
    masks = []
    for _ in range(2):
        model.zero_grad()
        loss, dropped = compiled(torch.zeros(1, 256))
        loss.backward()
        masks.append(dropped[0] != 0)
        assert 64 < masks[-1].sum() < 192
        gradient, of_bias = model.down.weight.grad, model.bias.grad
        assert torch.equal(gradient, dropped.detach().expand(8, -1))
        assert torch.equal(of_bias != 0, masks[-1])
    assert not torch.equal(*masks)


def test_a_codec_that_rounds_stochastically() -> None:
    """The values of the forward stay what they are. The rounding goes by the seed: the same one, the same gradients."""

    def gradient(seed: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        model.zero_grad()
        loss = compiled(x)
        loss.backward()
        return loss.detach(), model.down.weight.grad.clone()

    torch.manual_seed(0)
    model: Any = Block()
    model.dropout.p = 0.0
    compiled: Any = torch.compile(patch_model(model, CompressionConfig(mlp="int4_stochastic")), fullgraph=True)
    x = torch.randn(128, 64)
    (loss, first), (again_loss, again), (other_loss, other) = (gradient(seed) for seed in (1, 1, 2))
    assert torch.equal(loss, again_loss) and torch.equal(loss, other_loss)
    assert torch.equal(first, again) and not torch.equal(first, other)


def _drawn(graph: Graph) -> list[int]:
    """The seeds that a graph returns, drawn as Inductor's code does."""
    torch.manual_seed(0)
    values: dict[Any, Any] = {}
    for node in graph.nodes:
        if node.target is prims.seeds:
            values[node] = torch.randint(2**63 - 1, [node.args[0]])
        elif node.target is prims.lookup_seed:
            values[node] = values[node.args[0]][node.args[1]].item()
    return [*map(values.__getitem__, next(reversed(graph.nodes)).args[0]), torch.rand(1).item()]


def test_one_tensor_per_seed_draws_the_same_seeds() -> None:
    """A seed may be looked up twice or never, and the same holds for what is drawn later."""
    graph = Graph()
    seeds = graph.call_function(prims.seeds, (4, torch.device("cpu")))
    graph.output(tuple(graph.call_function(prims.lookup_seed, (seeds, i)) for i in (2, 0, 3, 2)))
    with torch._subclasses.FakeTensorMode():
        seeds.meta["val"] = torch.empty(4, dtype=torch.int64)
    before = _drawn(graph)
    divide_seeds(graph)
    assert _drawn(graph) == before and len(set(before)) == 4
    assert {node.args[0] for node in graph.nodes if node.target is prims.seeds} == {1}


class _Layers(nn.Module):
    """Equal layers; returns what each adds to the residual stream."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))
        self.act, self.dropout = nn.GELU(), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> list[Tensor]:
        added = []
        for up in self.ups:
            added.append(self.dropout(self.act(up(x))))
            x = x + added[-1]
        return added


def test_equal_layers_share_the_kernel_that_draws() -> None:
    """A CPU's kernels have no seed of their own in their code. Each layer draws its own mask, anew in each step."""

    def kernels(layers: int) -> int:
        torch._dynamo.reset()
        compiled = torch.compile(patch_model(_Layers(layers)), fullgraph=True)
        x = torch.randn(128, 64)
        with fresh_cache():
            added, (code, *_) = run_and_get_code(compiled, x)
            masks = [y != 0 for y in (*added, *compiled(x))]
        assert all(0.4 < mask.float().mean() < 0.6 for mask in masks)
        assert not any(torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])
        return code.count("async_compile.cpp_pybinding(")

    assert 0 < kernels(5) == kernels(3)
