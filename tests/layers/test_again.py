"""Outputs that a plan's readers have recomputed from what the plan keeps."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from hf_actcompress import patch_model
from tests.layers.blocks import WIDTH
from tests.layers.plans import plans_of


class TwoSums(nn.Module):
    """Keeps the sum in between for its second norm, and what it gates; its output is recomputed from the two."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm1(x))
        return x + self.gate * self.mlp(self.norm2(x))


class Patches(nn.Module):
    """Patches of pictures as many models embed them: a transposed view of a convolution's output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(4, WIDTH, 2, 2)
        self.blocks = nn.ModuleList([TwoSums(), TwoSums()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def test_from_a_tensor_that_is_packed_as_it_lies_in_memory() -> None:
    torch.manual_seed(0)
    stock = Patches().train()
    # 49 tokens of the width 32: another order of dimensions is another shape
    x = torch.randn(2, 4, 14, 14)
    ours = patch_model(copy.deepcopy(stock), "int8")
    for model in (ours, stock):
        model(x).backward()
    plans = plans_of(ours)
    assert plans and not any(one.why for one in plans)
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= 0.02 * b.grad.norm()
