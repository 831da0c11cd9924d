"""Layers with BatchNorm run by plans: stock's bits in gradients and running statistics, and no more bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from hf_actcompress import patch_model, unpatch_model
from tests.layers.plans import PLANS, plans_of
from tests.oracle import kept_bytes

SIDE = 32
MODELS: dict[str, Callable[[], Any]] = {
    "ResNet": lambda: hf.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[3, 2], layer_type="basic", num_labels=4
    ),
    "MobileNetV2": lambda: hf.MobileNetV2Config(image_size=SIDE, depth_multiplier=0.35, num_labels=4),
}
every_model = pytest.mark.parametrize("name", MODELS)


def build(name: str) -> Any:
    torch.manual_seed(0)
    return hf.AutoModelForImageClassification.from_config(MODELS[name]()).train()


def images(seed: int = 0) -> Tensor:
    return torch.randn(4, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


def losses(model: Any, steps: int = 3) -> list[Tensor]:
    """The losses of some steps, which change the running statistics, and the gradients of the last one."""
    found = []
    for step in range(steps):
        model.zero_grad()
        torch.manual_seed(step)
        found.append(model(images(step))[0].square().mean())
        found[-1].backward()
    return [*found, *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_same(ours: Any, stock: Any) -> None:
    assert all(map(torch.equal, losses(ours), losses(stock)))
    assert not [name for name, x in stock.named_buffers() if not torch.equal(x, dict(ours.named_buffers())[name])]


@every_model
def test_stock_bits_and_running_statistics(name: str) -> None:
    stock = build(name)
    ours = patch_model(copy.deepcopy(stock), PLANS)
    assert_same(ours, stock)
    # a stage of ResNet is one plan, and the layers in it have none
    assert any(plans.calls for plans in plans_of(ours)) and not any(plans.leaf_calls for plans in plans_of(ours))
    for model in (ours, stock):
        model.eval()
    assert_same(ours, stock)
    assert_same(unpatch_model(ours), stock)


@every_model
def test_frozen_norms(name: str) -> None:
    stock = build(name)
    for module in stock.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    assert_same(patch_model(copy.deepcopy(stock), PLANS), stock)


@every_model
def test_keeps_no_more_than_module_by_module(name: str) -> None:
    plans, leaves = (patch_model(build(name), replace(PLANS, plans=on)) for on in (True, False))
    losses(plans, 1)
    kept = [kept_bytes(lambda model=model: model(images()).logits.square().mean()) for model in (plans, leaves)]
    assert kept[0] <= kept[1]


class Block(nn.Module):
    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.convolution(x)))


class Net(nn.Module):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(momentum) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def run(model: nn.Module, times: int) -> list[Tensor]:
    """Several forwards before one backward, as in a siamese net."""
    xs = [torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(times)]
    torch.stack([model(x).square().mean() for x in xs]).sum().backward()
    return [*(x.grad for x in xs), *(p.grad for p in model.parameters())]


def test_two_forwards_before_a_backward() -> None:
    torch.manual_seed(0)
    stock = Net()
    ours = patch_model(copy.deepcopy(stock))
    assert all(map(torch.equal, run(ours, 2), run(stock, 2)))
    assert all(map(torch.equal, ours.buffers(), stock.buffers()))
    assert [plans.calls for plans in plans_of(ours)] == [2, 2]


def test_checkpointed_layers_update_statistics_as_stock_does() -> None:
    """Twice, so they go module by module."""
    torch.manual_seed(0)
    stock = hf.AutoModelForImageClassification.from_config(hf.PPLCNetConfig(num_labels=4)).train()
    stock.gradient_checkpointing_enable()
    ours = patch_model(copy.deepcopy(stock), PLANS)
    assert_same(ours, stock)
    told = "updates the statistics of its BatchNorm twice"
    assert all(told in plans.why for plans in plans_of(ours) if plans.leaf_calls)


def test_an_average_over_all_batches_goes_module_by_module() -> None:
    torch.manual_seed(0)
    stock = Net(momentum=None)
    ours = patch_model(copy.deepcopy(stock))
    assert all(map(torch.equal, run(ours, 2), run(stock, 2)))
    assert all(map(torch.equal, ours.buffers(), stock.buffers()))
    assert all("averages over all batches" in plans.why for plans in plans_of(ours))


class Odd(nn.Module):
    """A block that calls its BatchNorm in an odd way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.convolution = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.plain, self.other = (nn.BatchNorm2d(8, affine=False, eps=eps) for eps in (1e-5, 1.0))
        self.untracked = nn.BatchNorm2d(8, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolution(x)
        if self.way == "on two inputs":
            return x + torch.relu(self.norm(y)) + self.norm(torch.relu(x))
        if self.way == "twice":
            return x + torch.relu(self.norm(y)) * self.norm(y)
        if self.way == "unread":
            self.norm(y)
            return x + torch.relu(y)
        if self.way == "untracked":
            return x + torch.relu(self.untracked(y))
        return x + torch.relu(self.plain(y)) + torch.relu(self.other(y))


@pytest.mark.parametrize("way", ["on two inputs", "twice", "unread", "untracked", "of other constants"])
def test_norms_in_odd_ways(way: str) -> None:
    torch.manual_seed(0)
    stock = Net()
    stock.blocks = nn.ModuleList([Odd(way), Odd(way)])
    ours = patch_model(copy.deepcopy(stock))
    found, expected = ([x for x in (*model_run(model), *model.buffers()) if x is not None] for model in (ours, stock))
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)


def model_run(model: nn.Module) -> list[Tensor | None]:
    """A forward without backward, then one whose gradients are returned."""
    model(images_of(0))
    x = images_of(1).requires_grad_()
    model(x).square().mean().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def images_of(seed: int) -> Tensor:
    return torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(seed))
