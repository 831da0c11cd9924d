"""Modules with code of their own that run again in backward: which ones do, with stock's gradients and state."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import XIELUActivation
from transformers.models.bloom.modeling_bloom import BloomGelu
from transformers.models.deberta.modeling_deberta import DebertaLayerNorm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm

from hf_actcompress import patch_model
from hf_actcompress.modules.base import settings_of
from tests.oracle import assert_equal_bits, kept_bytes

WIDTH = 32


class GatedNorm(nn.Module):
    """A norm in fp32 with a learned gate. Stock keeps many tensors of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.gate = nn.Parameter(torch.linspace(0.5, 2, WIDTH)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (self.scale * y * torch.sigmoid(self.gate)).to(x.dtype) + x


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class Counting(nn.Module):
    """It has a state, which a second run would change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.silu(x) * F.silu(x + 1)


class Replacing(Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return F.silu(x) * F.silu(x + 1)


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x) * torch.rand_like(x)


class Squares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x @ x.transpose(-1, -2)) @ x


class Flat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class ByAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))
        # a copy of the module would call this method of the module itself
        self.run = self.native

    def native(self, x: Tensor) -> Tensor:
        return F.silu(x * self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


RUN_AGAIN: dict[str, Callable[[], nn.Module]] = {
    "own norm": GatedNorm,
    "bloom gelu": BloomGelu,
    "deberta norm": lambda: DebertaLayerNorm(WIDTH),
    "olmo norm": lambda: OlmoLayerNorm(WIDTH),
    "xielu": XIELUActivation,
}
LEFT_ALONE: dict[str, Callable[[], nn.Module]] = {
    "in place": Doubled, "state": Counting, "new state": Replacing, "random": Noisy, "products": Squares, "view": Flat,
    "mean": lambda: nn.AdaptiveAvgPool1d(1), "identity": nn.Identity, "elu in place": lambda: nn.ELU(inplace=True),
    "a method of its own as an attribute": ByAttribute,
}  # fmt: skip


class Model(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.up, self.part, self.down = nn.Linear(WIDTH, WIDTH), part, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.part(self.up(x)))


def gradients(model: nn.Module, x: Tensor, autocast: bool) -> list[Tensor]:
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.daily(3)
@pytest.mark.parametrize("mode", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("name", RUN_AGAIN)
def test_gradients_are_stocks_bits(name: str, mode: str) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if mode == "bf16" else torch.float32
    stock = Model(RUN_AGAIN[name]()).to(dtype)
    ours, x = patch_model(copy.deepcopy(stock)), torch.randn(2, 24, WIDTH).to(dtype)
    assert settings_of(ours.part).role == "recomputed"
    assert_equal_bits(gradients(ours, x, mode == "autocast"), gradients(stock, x, mode == "autocast"))
    # it keeps its input, and nothing for the layer after it
    assert kept_bytes(lambda: ours.part(x.clone().requires_grad_())) <= x.nbytes


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_others_are_left_alone(name: str) -> None:
    model = patch_model(Model(LEFT_ALONE[name]()))
    assert settings_of(model.part) is None


def test_weights_that_were_written_on_are_stocks_error() -> None:
    model = patch_model(Model(GatedNorm()))
    loss = model(torch.randn(2, 24, WIDTH)).sum()
    with torch.no_grad():
        model.part.scale.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", ["own norm", "deberta norm"])
def test_a_hook_on_a_weight_sees_one_gradient(name: str) -> None:
    """The second run, inside of the backward, must not call the hooks, or they would change the gradient twice."""
    results = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = Model(RUN_AGAIN[name]())
        for p in model.parameters():
            p.register_hook(lambda grad: 2 * grad)
        results.append(gradients(patch_model(model) if ours else model, torch.randn(2, 24, WIDTH), False))
    assert_equal_bits(results[1], results[0])


def test_only_some_gradients_are_wanted() -> None:
    for wanted in ("scale", "gate", None):
        results = []
        for ours in (False, True):
            torch.manual_seed(0)
            part = GatedNorm().requires_grad_(False)
            if wanted is not None:
                getattr(part, wanted).requires_grad_()
            model = nn.Sequential(part)
            if ours:
                patch_model(model)
            x = torch.linspace(-1, 1, 48 * WIDTH).view(48, WIDTH).requires_grad_(wanted is None)
            model(x).square().sum().backward()
            results.append([t.grad for t in (x, *part.parameters()) if t.grad is not None])
        assert len(results[0]) == 1
        assert_equal_bits(*results)


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
