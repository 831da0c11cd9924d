"""Plans whose code Inductor makes: errors, kept bytes, and numbers drawn from seeds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from hf_actcompress import patch_model
from tests.families import BY_NAME, oracle_step, relative_error, step
from tests.layers.plans import PLANS, assert_compiled, kept_bytes

COMPILED = replace(PLANS, compile=True)


@pytest.mark.parametrize("preset", ["exact", "int8"])
def test_inductor(preset: str) -> None:
    """At two sizes, errors are at most 1.1 times those without a compiler, and kept bytes are the same."""
    model = BY_NAME["llama"].build()
    ours = patch_model(copy.deepcopy(model), preset, compile=True)
    plain = patch_model(copy.deepcopy(model), preset)
    for batch, length in ((2, 24), (3, 40)):
        ids = torch.randint(3, 60, (batch, length), generator=torch.Generator().manual_seed(length))
        data = {"input_ids": ids, "labels": ids}
        oracle = oracle_step(model, data)
        errors = [relative_error(step(one, data)[1], oracle) for one in (ours, plain)]
        assert errors[0] <= 1.1 * errors[1] + 1e-7
        assert kept_bytes(ours, data) == kept_bytes(plain, data)
    assert_compiled(ours)


@pytest.mark.daily(2)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_inductor_draws_in_backward_what_it_drew(checkpointed: bool) -> None:
    """The gradient is the slope of the loss: dropout's masks are made again from their seeds."""
    torch.manual_seed(0)
    model = BY_NAME["bert"].build(torch.float64, dropout=0.2)
    if checkpointed:
        model.gradient_checkpointing_enable()
    ours, batch = patch_model(model, COMPILED), BY_NAME["bert"].make_batch()

    def loss() -> Tensor:
        torch.manual_seed(3)
        return ours(**batch).loss

    loss().backward()
    weight = ours.bert.encoder.layer[0].attention.self.value.weight
    way = torch.randn_like(weight)
    slopes = []
    for sign in (1, -1):
        with torch.no_grad():
            weight += sign * 1e-5 * way
        slopes.append(loss().detach())
        with torch.no_grad():
            weight -= sign * 1e-5 * way
    slope = (slopes[0] - slopes[1]) / 2e-5
    assert abs(slope - (weight.grad * way).sum()) <= 1e-6 * weight.grad.norm() * way.norm()
    assert_compiled(ours)


class Noise(nn.Module):
    """A block that multiplies a weight of ones by what it draws."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.weight, self.draw = nn.Linear(8, 8), nn.Parameter(torch.ones(64, 64)), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.draw(self.weight.detach()) + 0 * self.linear(x).sum()


DRAWS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "rand_like": (torch.rand_like, 0.5, 12**-0.5),
    "randn_like": (torch.randn_like, 0.0, 1.0),
    "rand": (lambda x: torch.rand(64, 64), 0.5, 12**-0.5),
    "randn": (lambda x: torch.randn(64, 64), 0.0, 1.0),
    "bernoulli": (lambda x: x.bernoulli(0.3), 0.3, 0.21**0.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_inductor_draws_from_the_same_distribution(name: str) -> None:
    """The gradient is what was drawn. Mean and deviation of 4,096 numbers are within five of their own deviations."""
    torch.manual_seed(0)
    draw, mean, deviation = DRAWS[name]
    blocks = patch_model(nn.ModuleList([Noise(draw), Noise(draw)]), COMPILED)
    y = blocks[0](torch.ones(4, 8))
    y.sum().backward()
    assert_compiled(blocks[:1])
    assert torch.equal(blocks[0].weight.grad, y)
    assert abs(float(y.mean()) - mean) < 5 * deviation / 64
    assert abs(float(y.std()) - deviation) < 5 * deviation / 64
