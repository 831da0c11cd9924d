"""BatchNorms: stock's code runs, and what reads their output keeps nothing of its own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from hf_actcompress import patch_model
from hf_actcompress.modules.base import settings_of
from tests.oracle import assert_equal_bits, kept_bytes


def gradients(model: nn.Module, x: Tensor, autocast: bool) -> list[Tensor]:
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters()), *model.buffers()]


class Images(nn.Module):
    """A block like a ResNet's: convolution, BatchNorm, ReLU, and a sum."""

    def __init__(self, track: bool, affine: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8, track_running_stats=track, affine=affine) for _ in range(2))
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norms[0](self.first(x)))
        return self.act(self.norms[1](self.second(y)) + x)


@pytest.mark.daily(3)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norm(training: bool, track: bool, affine: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    stock = Images(track, affine).to(dtype).train(training)
    ours, x = patch_model(copy.deepcopy(stock)), torch.randn(4, 8, 9, 7).to(dtype)
    assert settings_of(ours.norms[0]).role == "batch_norm"
    assert_equal_bits(gradients(ours, x, False), gradients(stock, x, False))
    kept = [kept_bytes(lambda model=model: model(-x.clone().requires_grad_())) for model in (ours, stock)]
    # ours does not keep the output of the first ReLU; that of the last is the model's output
    assert kept[0] <= kept[1] - x.nbytes
