"""Memory-sharing norms (MS-BP, arXiv 2406.16282) without their folding: records keep as few bytes, and are exact.

MS-LN removes weight and bias from the norm (folding them into every consumer) so that the norm can keep its output x^
and share it with the linear layers after it: the norm and all its consumers keep one tensor. With records the norm
keeps its input x and the consumers keep nothing of their own. This is one tensor too, and the parameters stay in the
norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hf_actcompress import ops
from hf_actcompress.records import frame, load, save, stored_exact
from tests.oracle import assert_equal_bits, clones, kept_bytes, pattern

ROWS, WIDTH = 48, 64


class FoldedNorm(torch.autograd.Function):
    """MS-LN as published: no affine parameters, keeps its output and rstd."""

    @staticmethod
    def forward(ctx, x: Tensor, eps: float) -> Tensor:
        normed, _, rstd = torch.native_layer_norm(x, (x.size(-1),), None, None, eps)
        save(ctx, stored_exact(normed), stored_exact(rstd))
        return normed

    @staticmethod
    def backward(ctx, dnormed: Tensor) -> tuple[Tensor, None]:
        normed, rstd = load(ctx)
        inner = (dnormed * normed).mean(-1, keepdim=True)
        return rstd * (dnormed - dnormed.mean(-1, keepdim=True) - normed * inner), None


@dataclass(frozen=True)
class Block:
    """A norm and three linear layers behind it: q, k, v."""

    inputs: list[Tensor]

    def stock(self) -> Tensor:
        x, gain, bias, *weights = self.inputs
        y = functional.layer_norm(x.clone(), (WIDTH,), gain, bias, 1e-5)
        return torch.cat([functional.linear(y, w) for w in weights], -1)

    def records(self) -> Tensor:
        x, gain, bias, *weights = self.inputs
        with frame():
            y = ops.layer_norm(x.clone(), (WIDTH,), gain, bias, 1e-5)
            return torch.cat([ops.linear(y, w) for w in weights], -1)

    def folded(self) -> Tensor:
        x, gain, bias, *weights = self.inputs
        y = FoldedNorm.apply(x.clone(), 1e-5)
        # the folded weights are computed beforehand, because in the folded model they are parameters
        with torch.no_grad():
            pairs = [((w * gain).requires_grad_(), (w @ bias).requires_grad_()) for w in weights]
        return torch.cat([functional.linear(y, w, b) for w, b in pairs], -1)


def block(dtype: torch.dtype) -> Block:
    x, weights = torch.randn(ROWS, WIDTH), [torch.randn(WIDTH, WIDTH) / 8 for _ in range(3)]
    gain, bias = 1 + 0.1 * torch.randn(WIDTH), 0.1 * torch.randn(WIDTH)
    return Block([t.to(dtype).requires_grad_() for t in (x, gain, bias, *weights)])


def run(inputs: list[Tensor], function: Callable[[Block], Tensor]) -> list[Tensor]:
    leaves = clones(inputs)
    y = function(Block(leaves))
    return [y.detach(), *torch.autograd.grad(y, leaves, pattern(y))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_without_folding(dtype: torch.dtype) -> None:
    """Output and all gradients, those of weight and bias among them, are bit-equal to stock's."""
    inputs = block(dtype).inputs
    assert_equal_bits(run(inputs, Block.records), run(inputs, Block.stock))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bytes_as_folded(dtype: torch.dtype) -> None:
    one = ROWS * WIDTH * dtype.itemsize
    statistics = kept_bytes(block(dtype).records) - one
    # mean and rstd; folded norms keep rstd alone
    assert statistics in (2 * ROWS * dtype.itemsize, 2 * ROWS * 4)
    assert kept_bytes(block(dtype).stock) == 2 * one + statistics
    built = block(dtype)
    # the folded parameters are made within what is measured
    folds = 3 * (WIDTH * WIDTH + WIDTH) * dtype.itemsize
    folded = kept_bytes(built.folded)
    assert folded == one + statistics // 2 + folds


def test_folded_is_the_same_function_but_for_rounding() -> None:
    built = block(torch.float64)
    torch.testing.assert_close(built.folded(), built.stock(), rtol=1e-12, atol=1e-12)
