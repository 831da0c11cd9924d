"""Codecs under autograd: what reaches dx, what a checkpoint recomputes, and what a second backward sees."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear as stock_linear
from torch.utils.checkpoint import checkpoint

from hf_actcompress.codecs import CODECS
from hf_actcompress.ops import linear

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
    torch.manual_seed(9)
    y = linear(x, weight, codec=codec)
    dy = torch.randn_like(y)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    assert torch.equal(dx, torch.autograd.grad(stock_linear(x, weight), x, dy)[0])
    torch.manual_seed(9)
    stored = codec.unpack(*codec.pack(x.detach()))
    expected = dy.flatten(0, 1).t().mm(stored.flatten(0, 1))
    # a sparse product sums in another order
    torch.testing.assert_close(dweight, expected, rtol=1e-4, atol=1e-4)


@every_row
def test_a_checkpoint_packs_the_same_codes_again(name: str) -> None:
    def block(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        h = linear(x, first, codec=CODECS[name]).relu()
        # the mask comes from the same generator, behind what the codec drew
        return linear(torch.nn.functional.dropout(h, 0.3), second, codec=CODECS[name])

    grads = []
    for run in (block, lambda *args: checkpoint(block, *args, use_reentrant=False)):
        inputs = leaves()
        torch.manual_seed(9)
        y = run(*inputs)
        torch.rand(3)
        grads.append(torch.autograd.grad(y.square().sum(), inputs))
    for plain, recomputed in zip(*grads, strict=True):
        assert torch.equal(plain, recomputed)


@every_row
def test_a_second_backward_sees_the_same(name: str) -> None:
    x, weight, _ = leaves(torch.bfloat16)
    y = linear(x, weight, codec=CODECS[name])
    first = torch.autograd.grad(y.sum(), (x, weight), retain_graph=True)
    second = torch.autograd.grad(y.sum(), (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
