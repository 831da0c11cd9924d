"""Nested forward differentiation: one tensor, f'(x), is kept for any composition."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from hf_actcompress.ops._activation_derivative import activation_derivative
from tests.oracle import assert_within_law, gradients, kept_bytes, nbytes

COMPOSITE = {"gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "quick_gelu": "quick_gelu", "laplace": "laplace"}
HALVES = (torch.float16, torch.bfloat16)


def swish_of_square(x: Tensor) -> Tensor:
    """A composition that no table knows."""
    return x * torch.sigmoid(x * x) + torch.where(x > 0, x.square(), torch.expm1(x) - x)


@pytest.mark.parametrize("name", COMPOSITE)
@pytest.mark.parametrize("by_table", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_at_least_as_exact_as_the_composition(name: str, by_table: bool, dtype: torch.dtype) -> None:
    stock = ACT2FN[name]
    x = torch.randn(64, 128).to(dtype).requires_grad_()
    ours = gradients(lambda x: activation_derivative(x, stock, COMPOSITE[name] if by_table else None), [x])
    in_stock = gradients(stock, [x])
    oracle = gradients(stock, [x.detach().double().requires_grad_()], in_stock[0].new_tensor(0).double() + _dy(x))
    assert torch.equal(ours[0], in_stock[0])
    if by_table or dtype != torch.float32:
        assert_within_law(ours[1:], in_stock[1:], oracle[1:])
    else:
        # dual numbers round in another order than reverse mode: each of at most 16 operations once
        assert (ours[1].double() - oracle[1]).norm() <= 16 * 2**-24 * oracle[1].norm()


def _dy(x: Tensor) -> Tensor:
    """What `gradients` hands in: the pattern, rounded to x's dtype."""
    return torch.sin(torch.arange(x.numel(), dtype=torch.float64) * 1.7 + 0.3).view(x.shape).to(x.dtype).double()


@pytest.mark.parametrize("function", [swish_of_square, torch.nn.functional.softsign, torch.nn.functional.elu])
def test_dual_numbers_need_no_table(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(300, dtype=torch.float64, requires_grad=True)
    y, dx = gradients(lambda x: activation_derivative(x, function), [x])
    expected_y, expected = gradients(function, [x])
    assert torch.equal(y, expected_y)
    torch.testing.assert_close(dx, expected, rtol=1e-12, atol=1e-14)


def test_a_constant_function_has_derivative_zero() -> None:
    x = torch.randn(5, requires_grad=True)
    (dx,) = torch.autograd.grad(activation_derivative(x, torch.ones_like).sum(), x)
    assert dx.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes(dtype: torch.dtype) -> None:
    x = torch.randn(64, 64).to(dtype).requires_grad_()
    ours = kept_bytes(lambda: activation_derivative(x, ACT2FN["gelu_new"], "gelu_tanh"))
    by_duals = kept_bytes(lambda: activation_derivative(x, ACT2FN["gelu_new"]))
    in_stock = kept_bytes(lambda: ACT2FN["gelu_new"](x))
    assert ours == by_duals == nbytes(x)
    # x itself is the fourth that stock keeps, and exists before
    assert 3 * nbytes(x) <= in_stock < 3 * nbytes(x) + 64
