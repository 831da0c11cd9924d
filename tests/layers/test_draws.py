"""Random numbers that a layer's own code draws: as many as stock draws, in stock's order, the same in backward."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Dinov2Config, Dinov2ForImageClassification

from hf_actcompress import patch_model
from tests.layers.blocks import WIDTH, Stack
from tests.layers.plans import DTYPES, PLANS, assert_all_ran, assert_same, plans_of

Draw = Callable[[Tensor], Tensor]


def _few(x: Tensor) -> Tensor:
    """One number per sequence, as stochastic depth has."""
    return x.new_empty(len(x), 1, 1)


# two draws of one size have the same arguments
DRAWS: dict[str, Draw] = {
    "rand": lambda x: torch.rand(len(x), 1, 1, device=x.device),
    "randn": lambda x: torch.randn(len(x), 1, 1),
    "randint": lambda x: torch.randint(1, 9, (len(x), 1, 1)),
    "randperm": lambda x: torch.randperm(len(x))[:, None, None],
    "rand_like": lambda x: torch.rand_like(_few(x)),
    "bernoulli": lambda x: torch.bernoulli(x.new_full((len(x), 1, 1), 0.5)),
    "bernoulli in place": lambda x: _few(x).bernoulli_(0.5),
    "uniform in place": lambda x: _few(x).uniform_(),
    "normal": lambda x: torch.normal(0.0, 1.0, (len(x), 1, 1)),
    "large": lambda x: torch.rand_like(x.detach()),
    "dropout of ones": lambda x: F.dropout(torch.ones(len(x), 1, 1), 0.5),
    "large dropout of ones": lambda x: F.dropout(torch.ones_like(x.detach()), 0.5),
}


class Deep(nn.Module):
    """A block with stochastic depth in both of its branches."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.norm, self.mix, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x)) * self.draw(x)
        y = F.gelu(self.mlp(x))
        return x + y[..., :WIDTH] * self.draw(x) + y[..., WIDTH:] * self.draw(x)


class DropsTwice(nn.Module):
    """Two dropouts of one tensor, which have two masks."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x)
        return F.dropout(y, 0.5) * F.dropout(y, 0.5) + F.dropout(y[:, :1], 0.5) * F.dropout(y[:, :1], 0.5)


class Difference(nn.Module):
    """Zero if two draws are one."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.mix, self.draw = nn.Linear(WIDTH, WIDTH, bias=False), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x) * (self.draw(x) - self.draw(x))


class DrawsForNothing(nn.Module):
    """Draws numbers that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(3)
        return F.dropout(self.mix(x), 0.5)


def assert_stock_bits(block: Callable[[], nn.Module], why: str = "", **options: bool) -> None:
    torch.manual_seed(0)
    stock = Stack(nn.ModuleList(block() for _ in range(2))).train()
    ours = patch_model(copy.deepcopy(stock), **options)
    # the second sizes have a graph for any sizes
    for length in (9, 64):
        found = []
        for model in (ours, stock):
            torch.manual_seed(1)
            x = torch.randn(2, length, WIDTH, requires_grad=True)
            loss = model(x)
            state = torch.get_rng_state()
            loss.backward()
            assert torch.equal(torch.get_rng_state(), state)
            found.append([loss, state, x.grad, *(p.grad for p in model.parameters())])
            model.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert plans_of(ours) and all((plans.calls, plans.why) == (0 if why else 2, why) for plans in plans_of(ours))


@pytest.mark.parametrize("draw", DRAWS)
def test_each_draw_is_one_of_stocks(draw: str) -> None:
    assert_stock_bits(lambda: Deep(DRAWS[draw]))


def test_two_dropouts_of_one_tensor_have_two_masks() -> None:
    assert_stock_bits(DropsTwice)


def test_draws_that_nobody_reads_are_drawn() -> None:
    assert_stock_bits(DrawsForNothing, why="its code draws numbers that it does not use")


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mode", DTYPES)
def test_stochastic_depth_of_a_model(mode: str, checkpointing: bool) -> None:
    """Both branches of each of DINOv2's layers are left out at random, for each picture."""
    config = Dinov2Config(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, mlp_ratio=2, image_size=28, patch_size=14,
        drop_path_rate=0.5, hidden_dropout_prob=0.1, num_labels=3,
    )  # fmt: skip
    torch.manual_seed(0)
    stock = Dinov2ForImageClassification(config).to(DTYPES[mode]).train()
    ours = patch_model(copy.deepcopy(stock), PLANS)
    pictures = torch.randn(5, 3, 28, 28).to(DTYPES[mode])
    for model in (ours, stock):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(ours, stock, {"pixel_values": pictures, "labels": torch.arange(5) % 3}, mode)
    assert_all_ran(ours)


@pytest.mark.parametrize("draw", ["rand", "bernoulli", "rand_like", "large", "dropout of ones"])
def test_compiled_draws_are_several(draw: str) -> None:
    """Inductor draws other numbers than torch does. Two draws differ, and backward has the same two."""
    model = patch_model(Stack(nn.ModuleList([Difference(DRAWS[draw])])).train(), compile=True)
    x = torch.randn(8, 9, WIDTH, requires_grad=True)
    loss = model(x)
    loss.backward()
    assert x.grad is not None and loss > 1e-3
    # the loss is quadratic in x
    torch.testing.assert_close((x * x.grad).sum(), 2 * loss)
    assert all(plans.calls == 1 and not plans.why_not_compiled() for plans in plans_of(model))
