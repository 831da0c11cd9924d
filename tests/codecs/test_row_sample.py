"""Sampled rows: their number is fixed, the gradient has no bias, and winner-take-all always keeps the largest rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hf_actcompress.errors import UnknownOptionError
from hf_actcompress.methods.row_sample.codec import RowSample
from hf_actcompress.reference import seed_codecs
from tests.codecs.helpers import DTYPES, activations, assert_weight_gradient, hoeffding, roundtrip, token_shapes

METHODS = {
    "wta": RowSample(0.3),
    "crs": RowSample(0.3, winner_take_all=False),
    "wta stratified": RowSample(0.3, draws="stratified"),
    "crs stratified": RowSample(0.3, winner_take_all=False, draws="stratified"),
}
codecs = st.builds(
    RowSample, st.sampled_from((0.05, 0.3, 0.9, 1.0)), st.booleans(), st.sampled_from(("independent", "stratified"))
)
methods = pytest.mark.parametrize("codec", METHODS.values(), ids=METHODS.keys())


def skewed(rows: int = 60, features: int = 12) -> Tensor:
    """Rows whose norms span two decades, as attention sinks cause, and some rows of zeros, as padding causes."""
    x = torch.randn(rows, features, dtype=torch.float64) * torch.logspace(-1, 1, rows, dtype=torch.float64)[:, None]
    x[7:11] = 0
    return x[torch.randperm(rows)]


def dweights(codec: RowSample, x: Tensor, dy: Tensor, draws: int) -> Tensor:
    out = []
    for _ in range(draws):
        dweight = codec.grad_weight(dy, *codec.pack(x))
        assert dweight is not None
        out.append(dweight)
    return torch.stack(out)


@settings(deadline=None, max_examples=150)
@given(activations(), codecs)
def test_kept_rows_are_as_many_as_declared_and_finite(x: Tensor, codec: RowSample) -> None:
    before = x.clone()
    tensors, meta = codec.pack(x)
    assert sum(t.untyped_storage().nbytes() for t in tensors) == codec.nbytes(x.shape, x.dtype)
    y = codec.unpack(tensors, meta)
    assert y.shape == x.shape and y.dtype == x.dtype and torch.equal(x, before)
    # a row may be scaled up to the sum of all norms. It is documented that this overflows in fp16 above 65504
    norms = torch.linalg.vector_norm(x.double(), dim=-1).sum() if x.dim() else x.abs()
    assert bool(y.isfinite().all()) or (x.dtype == torch.float16 and float(norms) > torch.finfo(x.dtype).max)
    if codec.fraction == 1.0:
        assert torch.equal(y, x)


@settings(deadline=None, max_examples=75)
@given(activations(token_shapes), codecs)
def test_weight_gradient_is_that_of_the_unpacked(x: Tensor, codec: RowSample) -> None:
    assert_weight_gradient(codec, x)


@methods
def test_the_weight_gradient_is_unbiased(codec: RowSample) -> None:
    torch.manual_seed(11)
    x = skewed()
    dy = torch.randn(len(x), 4, dtype=torch.float64)
    draws = 2000
    mean = dweights(codec, x, dy, draws).mean(0)
    # one estimate is a sum of k products. A drawn row is scaled to a norm of at most (sum of norms) / k, and a row that
    # is always kept does not vary. So an entry of dW lies in an interval of length 2 max |dy| (sum of norms)
    width = 2 * float(dy.abs().max()) * float(x.norm(dim=1).sum())
    error = (mean - dy.t() @ x).abs().max()
    assert float(error) <= width * hoeffding(draws, mean.numel())
    # that bound is wide. A closer one is five standard errors, from the deviation of the draws, for each of 48 entries
    deviation = dweights(codec, x, dy, 500).std(0)
    assert bool(((mean - dy.t() @ x).abs() <= 5 * deviation / math.sqrt(draws)).all())


@methods
def test_the_error_falls_with_the_root_of_the_draws(codec: RowSample) -> None:
    torch.manual_seed(12)
    x = skewed(200, 40)
    dy = torch.randn(len(x), 30, dtype=torch.float64)
    draws = dweights(codec, x, dy, 64 * 16) - dy.t() @ x
    few, many = draws.square().mean().sqrt(), draws.view(16, 64, *draws.shape[1:]).mean(1).square().mean().sqrt()
    # the mean square of 16 means over a matrix of rank >= 30 has a relative deviation of at most sqrt(2 / 16 / 30); the
    # tolerance is five such deviations
    assert float(few / many) == pytest.approx(8, rel=5 * math.sqrt(2 / 16 / 30))


def test_winners_and_strata_lower_the_variance() -> None:
    torch.manual_seed(13)
    x = skewed(100, 16)
    dy = torch.randn(len(x), 8, dtype=torch.float64)
    error = {name: float((dweights(codec, x, dy, 400) - dy.t() @ x).square().mean()) for name, codec in METHODS.items()}
    assert error["wta"] < error["crs"]
    assert error["wta stratified"] < error["wta"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_winners_are_kept_as_they_are(dtype: torch.dtype) -> None:
    x = torch.randn(50, 8).to(dtype)
    x[[3, 20, 41]] *= 500
    for _ in range(20):
        y = roundtrip(RowSample(0.2), x)
        assert torch.equal(y[[3, 20, 41]], x[[3, 20, 41]])
        assert int((y != 0).any(1).sum()) <= 10


def test_rows_without_mass_are_not_drawn() -> None:
    x = torch.zeros(40, 6)
    x[[5, 30]] = torch.randn(2, 6)
    for codec in METHODS.values():
        y = roundtrip(codec, x)
        assert bool(y.isfinite().all())
        assert not bool(y[[i for i in range(40) if i not in (5, 30)]].any())
    # if the number of kept rows suffices for all rows that are not zero, all of these are kept exactly
    assert torch.equal(roundtrip(RowSample(0.3), x), x)
    assert torch.equal(roundtrip(RowSample(0.3), torch.zeros(40, 6)), torch.zeros(40, 6))


def test_the_codecs_generator_decides() -> None:
    x = torch.randn(64, 8)
    for codec in METHODS.values():
        seed_codecs(1)
        first, second = roundtrip(codec, x), roundtrip(codec, x)
        seed_codecs(1)
        assert torch.equal(roundtrip(codec, x), first)
        assert not torch.equal(first, second)


def test_the_operations_shrink_with_the_rows() -> None:
    x, dy = torch.randn(200, 32), torch.randn(200, 16)
    packed = RowSample(0.1).pack(x)
    with FlopCounterMode(display=False) as sampled:
        RowSample(0.1).grad_weight(dy, *packed)
    assert sampled.get_total_flops() == 2 * 20 * 32 * 16


@methods
@pytest.mark.parametrize("poison", [math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_stays_so(codec: RowSample, poison: float, dtype: torch.dtype) -> None:
    x = torch.randn(40, 8).to(dtype)
    x[33, 5] = poison
    assert not bool(roundtrip(codec, x).isfinite().all())


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UnknownOptionError, match="'independent', 'stratified'"):
        RowSample(draws="poisson")
    with pytest.raises(ValueError, match="fraction"):
        RowSample(-0.1)
    assert RowSample().linear_only and not RowSample().lossless
