"""From the second sizes on a plan serves any sizes: its ops are stock's, and no composition of others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_actcompress import patch_model
from hf_actcompress.layers import layer
from tests.families import FAMILIES, Family, build, step
from tests.layers.plans import kept_bytes, plans_of

CHANNELS = 4
Op = Callable[[Tensor], Tensor]
OPS: dict[str, Op] = {
    **{mode: partial(F.interpolate, scale_factor=2, mode=mode) for mode in ("bilinear", "nearest", "bicubic")},
    "bilinear corners": partial(F.interpolate, scale_factor=2, mode="bilinear", align_corners=True),
    "to a size": lambda x: F.interpolate(x, size=(2 * x.size(2), 2 * x.size(3)), mode="bilinear"),
    "pooled": lambda x: F.interpolate(F.avg_pool2d(x, 2, ceil_mode=True), size=x.shape[2:], mode="bilinear"),
    "shuffled": lambda x: F.pixel_shuffle(torch.cat([x, x, x.abs(), x], 1), 2),
    "group norm": lambda x: F.group_norm(x, 2),
    "softmax": lambda x: F.softmax(x.flatten(2), -1).view(x.shape),
}
# calls by plans, where torch asks for a given size as a number: only the first sizes have one
CALLS = {"to a size": 1, "pooled": 2}


class Scaled(nn.Module):
    """A convolution, and an op of its output."""

    def __init__(self, op: Op) -> None:
        super().__init__()
        self.mix, self.back, self.op = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.Conv2d(CHANNELS, CHANNELS, 1), op

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.op(F.gelu(self.mix(x))))


class Pictures(nn.Module):
    def __init__(self, op: Op) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scaled(op), Scaled(op)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("op", OPS)
def test_stocks_bits_for_any_sizes(op: str) -> None:
    torch.manual_seed(0)
    stock = Pictures(OPS[op]).train()
    ours = patch_model(copy.deepcopy(stock))
    for size in ((6, 6), (8, 10), (9, 7)):
        x = torch.randn(2, CHANNELS, *size)
        found = []
        for model in (ours, stock):
            given = x.clone().requires_grad_()
            loss = model(given)
            loss.backward()
            found.append([loss.detach(), given.grad, *(p.grad for p in model.parameters())])
            model.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert sum(plans.calls for plans in plans_of(ours)) == CALLS.get(op, 6)


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family.name in ("bert", "llama", "t5")], ids=lambda family: family.name
)
def test_bytes_of_the_first_sizes(family: Family) -> None:
    """The third sizes keep what they would keep as the first ones: T5's zeros in place of a bias, for example, too."""
    stock = build(family, "fp32")
    sizes = [{"batch": batch, "length": length} for batch, length in ((4, 19), (3, 13), (2, 17))]
    last, *others = [replace(family, sizes=each).make_batch() for each in sizes]
    first, third = (patch_model(copy.deepcopy(stock)) for _ in range(2))
    for batch in others:
        step(third, batch)
    assert kept_bytes(third, last) == kept_bytes(first, last)


class Chunks(nn.Module):
    """Computes a chunk of two columns after the other: another number of chunks is another graph."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        for chunk in x.split(2, 2):
            x = x * chunk.mean()
        return x


def test_code_that_makes_a_graph_for_each_size_gets_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes after that run module by module, with the same results, and the report says why."""
    nodes = 100
    monkeypatch.setattr(layer, "_MOST_NODES", nodes)
    torch.manual_seed(0)
    stock = Pictures(OPS["nearest"])
    stock.blocks = nn.ModuleList([Chunks(), Chunks()])
    stock.train()
    ours = patch_model(copy.deepcopy(stock))
    for columns in range(8, 40, 4):
        x = torch.randn(2, 3, columns, CHANNELS)
        grads = [torch.autograd.grad(model(x), [*model.parameters()]) for model in (ours, stock)]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)
    plans = plans_of(ours)[0]
    traced = [known for known in plans.known() if known.sizes is not None]
    assert 0 < len(traced) < 5 and plans.leaf_calls > 0
    assert "other graphs for other sizes" in plans.why
