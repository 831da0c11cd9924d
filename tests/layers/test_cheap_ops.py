"""What stands between two products and is cheap is recomputed, with stock's bits; and so are the sums of a loop."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_actcompress import patch_model
from tests.layers.plans import assert_all_ran
from tests.oracle import kept_bytes

CHANNELS, SIDE = 8, 12
OPS: dict[str, Callable[[], nn.Module]] = {
    "hardswish": nn.Hardswish,
    "prelu": nn.PReLU,
    "nearest": lambda: nn.Upsample(scale_factor=2, mode="nearest"),
    "average": lambda: nn.AvgPool2d(2),
    "maximum": lambda: nn.MaxPool2d(2),
}
# sums of one kind in the loop of a module
STEPS = 40


class Between(nn.Module):
    """An op between two convolutions, the second of which reads the op's output in its backward."""

    def __init__(self, op: nn.Module) -> None:
        super().__init__()
        self.mix, self.op = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), op
        width = op(torch.zeros(1, CHANNELS, SIDE, SIDE)).size(1)
        self.back = nn.Conv2d(width, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.op(self.mix(x)))  # type: ignore[no-any-return]


class Loop(nn.Module):
    """Adds a row of one token after the other, as linear attention does in a chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.back = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x)
        scores = x @ x.transpose(-1, -2)
        for i in range(1, STEPS):
            row = scores[..., i, :i].clone()
            scores[..., i, :i] = row + (row.unsqueeze(-1) * scores[..., :i, :i].clone()).sum(-2)
        return self.back(F.softmax(scores, -1) @ x)  # type: ignore[no-any-return]


class OneBlock(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x).sum()  # type: ignore[no-any-return]


def patched(block: nn.Module, x: Tensor) -> nn.Module:
    """A model that runs by a plan, with stock's bits."""
    stock = OneBlock(block).train()
    ours = patch_model(copy.deepcopy(stock))
    grads = [torch.autograd.grad(model(x), [*model.parameters()]) for model in (stock, ours)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert_all_ran(ours)
    return ours


@pytest.mark.parametrize("name", OPS)
def test_its_output_is_not_kept(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, CHANNELS, SIDE, SIDE)
    model = patched(Between(OPS[name]()), x)
    # the caller holds x; only the first convolution's output, which is as large, is kept
    assert kept_bytes(lambda: model(x)) <= 1.1 * x.nbytes


def test_a_weight_of_a_norm_and_a_direction_is_not_kept() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, CHANNELS, SIDE, SIDE)
    op = nn.utils.parametrizations.weight_norm(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1))
    model = patched(Between(op), x)
    # what the second and the third convolution read, and no weight
    assert kept_bytes(lambda: model(x)) <= 2.1 * x.nbytes


def test_the_sums_of_a_loop_are_not_kept() -> None:
    torch.manual_seed(0)
    x = 0.1 * torch.randn(2, STEPS, CHANNELS)
    model = patched(Loop(), x)
    # the caller holds x; the first product, which is as large, is all that is kept
    assert kept_bytes(lambda: model(x)) == x.nbytes
