"""An input that several calls of a block read, and other blocks, too: each reader's gradient is returned by itself."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from hf_actcompress import patch_model
from tests.layers.blocks import WIDTH
from tests.layers.plans import plans_of


class TwoStreams(nn.Module):
    """Two streams, of which the second one ends as it began, with a gated sum of itself in between (AuraFlow)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.condition = nn.Linear(WIDTH, 2 * WIDTH)
        self.mix, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        gate, scale = self.condition(nn.functional.silu(t))[:, None].chunk(2, dim=-1)
        mixed = self.mix(self.norm(y)) + x.mean(1, keepdim=True)
        inner = self.norm2(y + gate * mixed) * (1 + scale)
        return x + mixed.mean(1, keepdim=True), y + gate * self.mlp(inner)


class Streams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([TwoStreams(), TwoStreams()])

    def forward(self, x: Tensor, y: Tensor, t: Tensor) -> Tensor:
        for block in self.blocks:
            x, y = block(x, y, t)
        return x.square().sum() + y.square().sum()


def test_each_readers_gradient_is_returned() -> None:
    # the backward reads a gradient of y itself, behind the sum of y's gradients: it was dropped and not returned
    torch.manual_seed(0)
    stock = Streams().train()
    ours = patch_model(copy.deepcopy(stock))
    found = []
    for model in (ours, stock):
        given = [torch.randn(2, *s, WIDTH, generator=torch.Generator().manual_seed(1)) for s in ((8,), (5,), ())]
        given = [x.requires_grad_() for x in given]
        model(*given).backward()
        found.append([x.grad for x in (*given, *model.parameters())])
    assert plans_of(ours) and not any(plans.why for plans in plans_of(ours))
    assert [torch.equal(a, b) for a, b in zip(*found, strict=True)] == [True] * len(found[0])
