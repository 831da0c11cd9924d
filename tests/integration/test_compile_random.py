"""Random numbers of graphs that Inductor compiles: masks of dropout, and codecs that round stochastically."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_actcompress import CompressionConfig, patch_model
from tests.integration.compile_worker import Block

pytestmark = pytest.mark.daily(3)


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
