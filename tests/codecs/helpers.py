"""Inputs for the tests of codecs, and checks of what a codec returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from hf_actcompress.codecs import Codec

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

Layout = Callable[[Tensor], Tensor]


def _strided(x: Tensor) -> Tensor:
    """Every second feature of a wider tensor."""
    return torch.stack((x, x), dim=-1).flatten(-2)[..., ::2] if x.dim() else x


def _transposed(x: Tensor) -> Tensor:
    """Heads before tokens, as in q, k and v: not contiguous, so it cannot be flattened without a copy."""
    return x.transpose(0, -2).contiguous().transpose(0, -2) if x.dim() > 1 else x


LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda x: x,
    "strided": _strided,
    "transposed": _transposed,
    "offset": lambda x: torch.cat((x[:1], x))[1:] if x.dim() else x,
    "expanded": lambda x: x[:1].expand(x.shape) if x.dim() else x,
}

shapes = st.lists(st.integers(0, 7), max_size=3).flatmap(
    lambda outer: st.integers(0, 150).map(lambda features: (*outer, features))
)


@st.composite
def activations(draw: st.DrawFn, shape: st.SearchStrategy[tuple[int, ...]] = shapes) -> Tensor:
    """Tensors of any shape, dtype and layout: large, tiny, with an offset, with outliers, or constant."""
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    x = torch.randn(draw(shape), generator=generator, dtype=torch.float64)
    # these factors and offsets suit fp16, whose range is from 6e-8 to 65504
    x = x * 10.0 ** draw(st.integers(-4, 3)) + draw(st.sampled_from((0.0, 1.0, -300.0)))
    if draw(st.booleans()) and x.dim():
        x[..., ::37] *= 10
    if draw(st.integers(0, 9)) == 0:
        x = torch.full_like(x, 0.1)
    return LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](x.to(dtype))


def roundtrip(codec: Codec, x: Tensor) -> Tensor:
    y = codec.unpack(*codec.pack(x))
    assert y.shape == x.shape and y.dtype == x.dtype
    return y


def rounding(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to that dtype."""
    return torch.finfo(dtype).eps / 2


def hoeffding(draws: int, values: int, failure: float = 1e-9) -> float:
    """A bound for the distance of each of `values` means from its expectation.

    Each mean is of `draws` numbers in an interval of length 1. The bound fails with a probability of `failure` at most.
    """
    return math.sqrt(math.log(2 * values / failure) / (2 * draws))


def relative(error: Tensor, x: Tensor) -> float:
    return float(error.double().norm() / x.double().norm())


def assert_weight_gradient(codec: Codec, x: Tensor, outputs: int = 5) -> None:
    """Check that `grad_weight` is the product of dy and what `unpack` returns, up to the rounding of sums."""
    dy = torch.sin(torch.arange(math.prod(x.shape[:-1]) * outputs, dtype=torch.float64) * 1.7 + 0.3)
    dy = dy.view(*x.shape[:-1], outputs).to(x)
    tensors, meta = codec.pack(x)
    dweight = codec.grad_weight(dy, tensors, meta)
    assert dweight is not None
    assert dweight.dtype == x.dtype and dweight.shape == (outputs, x.size(-1))
    rows, dy_rows = codec.unpack(tensors, meta).double().flatten(0, -2), dy.double().flatten(0, -2)
    # in any order, a sum of n products is rounded n times in the work dtype. Each error is relative to a number that is
    # at most the sum of the magnitudes
    magnitude = dy_rows.abs().t() @ rows.abs()
    # three more roundings are in x's dtype: of dy's sums over pooled tokens, of partial sums, and of the result
    unit = 3 * rounding(x.dtype) + (len(rows) + 2) * torch.finfo(torch.float32).eps
    if x.dtype == torch.float64:
        unit = (len(rows) + 5) * torch.finfo(torch.float64).eps
    error = (dweight.double() - dy_rows.t() @ rows).abs()
    # a sampled row times its weight, or a sum of such rows, may be too large for fp16
    beyond = ~(magnitude < torch.finfo(x.dtype).max / 2)
    assert bool((beyond | (error <= unit * magnitude + torch.finfo(x.dtype).smallest_normal)).all())


token_shapes = st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 70))


def gradient(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The gradient of a batch's loss by all parameters, as one vector."""
    model.zero_grad()
    model(**batch).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def gradient_error(model: Any, batch: dict[str, Tensor], exact: Tensor) -> float:
    """The relative error of this gradient, as the root of the mean square of six draws."""
    errors = [relative(gradient(model, batch) - exact, exact) ** 2 for _ in range(6)]
    return math.sqrt(sum(errors) / len(errors))
