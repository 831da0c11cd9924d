"""Layers whose code writes into their weights, as Gemma 3n does, run by plans and write what stock writes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from hf_actcompress import patch_model
from hf_actcompress.graphs.tidied import without_copies
from tests.oracle import assert_equal_bits, kept_bytes

Write = Callable[[nn.Module], None]


def clamp(layer: nn.Module) -> None:
    layer.coefficients.weight.data.clamp_(-0.1, 0.1)


def halve(layer: nn.Module) -> None:
    """Twice is not once."""
    layer.coefficients.weight.data.mul_(0.5)


def average(layer: nn.Module) -> None:
    """A buffer, which nothing reads with a gradient."""
    with torch.no_grad():
        layer.average.mul_(0.9).add_(layer.coefficients.weight.mean(0), alpha=0.1)


class Layer(nn.Module):
    def __init__(self, write: Write) -> None:
        super().__init__()
        self.write, self.norm = write, nn.LayerNorm(32)
        self.coefficients, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.average = nn.Buffer(torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        y = self.coefficients(self.norm(x))
        if self.training:
            self.write(self)
        y = nn.functional.gelu(y + self.coefficients(x))
        return x + self.down(y) * (1 + self.average)


class Model(nn.Module):
    def __init__(self, write: Write) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(write) for _ in range(3))
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x.square().mean()


@pytest.mark.parametrize("way", ["step", "two forwards", "accumulated", "evaluated", "checkpointed"])
@pytest.mark.parametrize("write", [clamp, average])
def test_as_stock(write: Write, way: str) -> None:
    stock = Model(write)
    ours = patch_model(copy.deepcopy(stock))
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1))
    for model in (stock, ours):
        model.checkpointed = way == "checkpointed"
        model.train(way != "evaluated")
        for step in range(2):
            losses = [model(x * (step + 1))]
            if way == "two forwards":
                losses.append(model(x + 1))
            for loss in losses:
                loss.backward()
            if way != "accumulated":
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.grad
                model.zero_grad()
    assert_equal_bits([*stock.state_dict().values()], [*ours.state_dict().values()])
    assert_equal_bits(*[[p.grad for p in m.parameters() if p.grad is not None] for m in (stock, ours)])
    if way != "checkpointed":
        assert all(layer.actcompress.plans.calls and not layer.actcompress.plans.leaf_calls for layer in ours.layers)


def test_backward_reads_what_the_forward_has_read() -> None:
    """What the code computes before it writes is of the weight as it was, also where backward computes it again."""
    stock = Model(halve)
    ours = patch_model(copy.deepcopy(stock))
    x = torch.randn(2, 16, 32)
    for model in (stock, ours):
        model(x).backward()
    assert_equal_bits([*stock.state_dict().values()], [*ours.state_dict().values()])
    assert_equal_bits(*[[p.grad for p in m.parameters() if p.grad is not None] for m in (stock, ours)])
    assert kept_bytes(lambda: ours(x)) < kept_bytes(lambda: stock(x))


@pytest.mark.parametrize("names", [0, 1, 2])
def test_what_is_said_of_another_name_is_said_of_the_tensor(names: int) -> None:
    """torch 2.14 and newer write another name of what is computed, which older ones do not."""
    graph = Graph()
    made = named = graph.call_function(torch.ops.aten.mul.Tensor, (graph.placeholder("weight"), 0.5))
    for _ in range(names):
        named = graph.call_function(torch.ops.aten.alias.default, (named,))
    named.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    graph.output((named,))
    without_copies(graph)
    assert graph.output_node().args[0] == (made,) and made.meta["recompute"] == CheckpointPolicy.MUST_SAVE
