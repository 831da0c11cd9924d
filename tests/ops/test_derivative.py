"""Nested forward differentiation: one tensor, f'(x), is kept for any composition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from hf_actcompress.methods.derivative.op import activation_derivative
from tests.oracle import assert_within_law, gradients, kept_bytes, nbytes

COMPOSITE = {"gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "quick_gelu": "quick_gelu", "laplace": "laplace"}
HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("name", COMPOSITE)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_at_least_as_exact_as_the_composition(name: str, dtype: torch.dtype) -> None:
    stock = ACT2FN[name]
    x = torch.randn(64, 128).to(dtype).requires_grad_()
    ours = gradients(lambda x: activation_derivative(x, stock, COMPOSITE[name]), [x])
    in_stock = gradients(stock, [x])
    oracle = gradients(stock, [x.detach().double().requires_grad_()], in_stock[0].new_tensor(0).double() + _dy(x))
    assert torch.equal(ours[0], in_stock[0])
    assert_within_law(ours[1:], in_stock[1:], oracle[1:])


def _dy(x: Tensor) -> Tensor:
    """The incoming gradient that `gradients` uses: the pattern, rounded to x's dtype."""
    return torch.sin(torch.arange(x.numel(), dtype=torch.float64) * 1.7 + 0.3).view(x.shape).to(x.dtype).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes(dtype: torch.dtype) -> None:
    x = torch.randn(64, 64).to(dtype).requires_grad_()
    ours = kept_bytes(lambda: activation_derivative(x, ACT2FN["gelu_new"], "gelu_tanh"))
    in_stock = kept_bytes(lambda: ACT2FN["gelu_new"](x))
    assert ours == nbytes(x)
    # stock keeps x as a fourth tensor, but x existed before
    assert 3 * nbytes(x) <= in_stock < 3 * nbytes(x) + 64
