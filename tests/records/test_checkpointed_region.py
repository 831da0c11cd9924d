"""What torch's checkpointing saves for a region belongs to no node."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_actcompress import patch_model

WIDTH = 32


class Region(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + self.linear(self.norm(y))


class Masked(nn.Module):
    """The last call before a checkpointed region is a product with a mask, which the region reads second."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.region = nn.Linear(WIDTH, WIDTH), Region()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(x)
        y = self.norm(x) * mask
        out: Tensor = checkpoint(self.region, x, y, use_reentrant=False)
        return out.square().sum()


def test_an_input_is_not_made_of_another_one() -> None:
    # y was recomputed as x * mask: x was taken for a factor that the product has saved, because it was saved after it
    torch.manual_seed(0)
    stock = Masked().train()
    ours = patch_model(copy.deepcopy(stock))
    x, mask = torch.randn(2, 64, WIDTH), (torch.arange(64) < 50).expand(2, 64)[..., None]
    for model in (ours, stock):
        model(x, mask).backward()
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert (a.grad - b.grad).norm() <= 1e-6 * b.grad.norm()
