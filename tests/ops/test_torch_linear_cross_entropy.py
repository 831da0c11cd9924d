"""Why the loss head does not call torch's own chunked op. If a test fails, torch has changed: review that decision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_actcompress.ops import linear_cross_entropy
from tests.oracle import EXACT, held_bytes

if not hasattr(F, "linear_cross_entropy"):
    pytest.skip("this torch has no linear_cross_entropy", allow_module_level=True)

N, D, V = 256, 64, 4000


def _torchs(h: Tensor, w: Tensor, t: Tensor, reduction: str) -> Tensor:
    return F.linear_cross_entropy(h, w, t, reduction=reduction, options=torch.nn.LinearCrossEntropyOptions())


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(N, D, generator=generator).to(dtype).requires_grad_()
    w = (torch.randn(V, D, generator=generator) / 8).to(dtype).requires_grad_()
    return h, w, torch.randint(V, (N,), generator=generator)


def test_the_mean_keeps_a_gradient_of_vocabulary_size() -> None:
    h, w, t = _inputs(torch.float32)
    assert held_bytes(lambda: _torchs(h, w, t, "mean")) >= V * D * 4
    assert held_bytes(lambda: linear_cross_entropy(h, w, t)) < V * D * 4 // 50


def test_the_rows_have_less_exact_gradients_in_bf16() -> None:
    h, w, t = _inputs(torch.bfloat16)
    wide = [x.detach().double().requires_grad_() for x in (h, w)]
    (truth,) = torch.autograd.grad(F.cross_entropy(wide[0] @ wide[1].t(), t), wide[1:])

    def error(loss: Tensor) -> float:
        (found,) = torch.autograd.grad(loss, [w])
        return float((found.double() - truth).norm() / truth.norm())

    stock = error(F.cross_entropy(F.linear(h, w).float(), t))
    assert error(_torchs(h, w, t, "none").mean()) > EXACT * stock
    assert error(linear_cross_entropy(h, w, t)) <= EXACT * stock
