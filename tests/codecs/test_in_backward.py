"""Codecs under autograd: dx is stock's, checkpoints recompute the same, and a second backward gives the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear as stock_linear
from torch.utils.checkpoint import checkpoint

from hf_actcompress.codecs.table import CODECS
from hf_actcompress.ops import linear
from hf_actcompress.records import clear
from hf_actcompress.reference import seed_codecs

every_row = pytest.mark.parametrize("name", sorted(CODECS))


def leaves(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """x [2, 24, 64], and two weights, [48, 64] and [32, 48]."""
    generator = torch.Generator().manual_seed(4)
    shapes = ((2, 24, 64), (48, 64), (32, 48))
    x, first, second = (torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes)
    return x, first, second


@every_row
def test_dx_is_stocks_and_dweight_that_of_what_was_stored(name: str) -> None:
    codec = CODECS[name]
    x, weight, _ = leaves()
    seed_codecs(9)
    y = linear(x, weight, codec=codec)
    dy = torch.randn_like(y)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    assert torch.equal(dx, torch.autograd.grad(stock_linear(x, weight), x, dy)[0])
    seed_codecs(9)
    stored = codec.unpack(*codec.pack(x.detach()))
    expected = dy.flatten(0, 1).t().mm(stored.flatten(0, 1))
    # a sparse product sums in another order
    torch.testing.assert_close(dweight, expected, rtol=1e-4, atol=1e-4)


@every_row
def test_a_checkpointed_region_packs_what_its_second_pass_draws(name: str) -> None:
    def block(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        h = linear(x, first, codec=CODECS[name]).relu()
        return linear(torch.nn.functional.dropout(h, 0.3), second, codec=CODECS[name])

    def run(passes: int, call: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        seed_codecs(9)
        inputs = leaves()
        for _ in range(passes):
            torch.manual_seed(9)  # so that dropout has the same mask in every pass
            clear()
            y = call(*inputs)
        torch.rand(3)
        return torch.autograd.grad(y.square().sum(), inputs)

    plain = run(2, block)
    checkpointed = run(1, lambda *args: checkpoint(block, *args, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))


@every_row
def test_a_second_backward_sees_the_same(name: str) -> None:
    x, weight, _ = leaves(torch.bfloat16)
    y = linear(x, weight, codec=CODECS[name])
    first = torch.autograd.grad(y.sum(), (x, weight), retain_graph=True)
    second = torch.autograd.grad(y.sum(), (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def weight_gradients(name: str, draws: int) -> tuple[Tensor, Tensor]:
    """dW [draws, 48, 64], each with another seed, and the exact dW; both in fp64."""
    x, weight, _ = leaves(torch.float64)
    dy = torch.cos(torch.arange(2 * 24 * 48, dtype=torch.float64)).view(2, 24, 48)
    estimates = []
    for seed in range(draws):
        seed_codecs(seed)
        # or else the record of x would be used again, with the numbers of the seed before
        clear()
        estimates.append(torch.autograd.grad(linear(x, weight, codec=CODECS[name]), weight, dy)[0])
    return torch.stack(estimates), torch.autograd.grad(stock_linear(x, weight), weight, dy)[0]


UNBIASED = ("int8_stochastic", "int4_stochastic", "int2_stochastic", "wtacrs30", "crs30", "sampled30")


@pytest.mark.parametrize("name", UNBIASED)
def test_the_weight_gradient_is_right_on_average(name: str) -> None:
    estimates, exact = weight_gradients(name, 256)
    errors = estimates - exact
    # every entry is within five standard errors of the mean of 256 draws
    assert bool((errors.mean(0).abs() <= 5 * errors.std(0) / 16).all())
    few, many = errors.view(16, 16, 48, 64).mean(1).square().mean().sqrt(), errors.mean(0).square().mean().sqrt()
    # the error falls as 1 / sqrt(n): with 16 times as many draws it is a quarter. dW has at least the 48 dimensions of
    # the rows that are sampled, so its mean square has a relative deviation of at most sqrt(2 / 48), and its root has
    # half of that. The tolerance is five such deviations
    assert float(few / many) == pytest.approx(4, rel=5 * (2 / 48) ** 0.5 / 2)


@pytest.mark.parametrize("name", ["int4", "topk30", "block30", "pool2"])
def test_the_others_do_not_average_out(name: str) -> None:
    estimates, exact = weight_gradients(name, 2)
    assert torch.equal(estimates[0], estimates[1])
    assert float((estimates[0] - exact).norm() / exact.norm()) > 0.01
