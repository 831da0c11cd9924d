"""DropIT keeps the largest entries exactly; positions take the fewest bytes; shapes do not depend on values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_actcompress.errors import UnknownOptionError
from hf_actcompress.methods.topk.codec import TopK
from hf_actcompress.reference import seed_codecs
from tests.codecs.helpers import DTYPES, activations, assert_weight_gradient, roundtrip, token_shapes

codecs = st.builds(TopK, st.sampled_from((0.01, 0.1, 0.3, 1.0)), st.sampled_from(("row", "global", "nsigma")))


@settings(deadline=None, max_examples=150)
@given(activations(), codecs)
def test_kept_entries_are_exact_and_as_many_as_declared(x: Tensor, codec: TopK) -> None:
    before = x.clone()
    tensors, meta = codec.pack(x)
    assert sum(t.untyped_storage().nbytes() for t in tensors) == codec.nbytes(x.shape, x.dtype)
    y = codec.unpack(tensors, meta)
    assert y.shape == x.shape and y.dtype == x.dtype
    assert torch.equal(x, before)
    kept = y != 0
    assert torch.equal(y[kept], x[kept])
    if x.numel():
        rows = y.reshape(1, -1) if codec.scope == "global" or not x.dim() else y.reshape(-1, x.size(-1))
        values = x.reshape(rows.shape)
        k = min(rows.size(1), max(1, math.floor(codec.fraction * rows.size(1) + 0.5)))
        assert tensors[0].shape == (rows.size(0), k)
        if codec.scope != "nsigma":
            # what is dropped is no larger than what is kept
            largest = values.abs().topk(k, dim=1).values
            assert torch.equal(rows.abs().topk(k, dim=1).values, largest)


@settings(deadline=None, max_examples=75)
@given(activations(token_shapes), st.sampled_from((0.02, 0.1, 0.4)), st.sampled_from(("row", "nsigma")))
def test_weight_gradient_is_that_of_the_unpacked(x: Tensor, fraction: float, scope: str) -> None:
    assert_weight_gradient(TopK(fraction, scope), x)


def test_weight_gradient_over_several_chunks() -> None:
    x = torch.randn(3, 1000, 300, dtype=torch.bfloat16)  # 3.4 chunks of 2^18 elements
    assert_weight_gradient(TopK(0.1), x)


@pytest.mark.parametrize(
    ("features", "fraction", "bytes_per_row"),
    [
        (256, 0.1, 26 * 4 + 26),  # one byte each
        (256, 0.2, 51 * 4 + 32),  # a bit per element
        (1024, 0.05, 51 * 4 + 102),  # two bytes each
        (1024, 0.1, 102 * 4 + 128),
        (70000, 0.01, 700 * 4 + 2800),  # four bytes each
    ],
)
def test_positions_take_the_fewest_bytes(features: int, fraction: float, bytes_per_row: int) -> None:
    x = torch.randn(2, features)
    assert TopK(fraction).nbytes(x.shape, x.dtype) == 2 * bytes_per_row
    y = roundtrip(TopK(fraction), x)
    largest = x.abs().topk(round(fraction * features), dim=1).indices
    assert torch.equal(y.gather(1, largest), x.gather(1, largest))


def test_positions_beyond_the_sign_bit() -> None:
    x = torch.zeros(1, 65536)
    x[0, [3, 32768, 65535]] = torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(roundtrip(TopK(3 / 65536), x), x)


def test_nsigma_keeps_what_lies_outside() -> None:
    seed_codecs(3)
    x = torch.randn(64, 512)
    codec = TopK(0.2, "nsigma")
    y = roundtrip(codec, x)
    # a normal distribution has a fifth of its mass outside
    bound = 1.2815515655446004 * x.double().std(unbiased=False)
    outside = (x.double() - x.double().mean()).abs() > bound
    # a row with more than 102 such entries keeps the first 102; a row with fewer keeps some others, too
    share = outside.cumsum(1) <= 102
    assert torch.equal(y[outside & share], x[outside & share])
    assert int((y != 0).sum()) == 64 * 102
    assert float(outside[y != 0].float().mean()) > 0.95


@pytest.mark.parametrize("scope", ["row", "global", "nsigma"])
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_stays_so(scope: str, poison: float, dtype: torch.dtype) -> None:
    x = torch.randn(4, 96).to(dtype)
    x[2, 90] = poison
    y = roundtrip(TopK(0.1, scope), x)
    assert not bool(y[2].isfinite().all())


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UnknownOptionError, match="'row', 'global', 'nsigma'"):
        TopK(0.1, "column")
    with pytest.raises(ValueError, match="fraction"):
        TopK(0.0)
    assert TopK().linear_only and not TopK().lossless
