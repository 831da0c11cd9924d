"""Pooled activations are means of p tokens of one sequence. The weight gradient's product has p times fewer rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.errors import UnknownOptionError
from hf_actcompress.methods.pooled.codec import Pooled
from tests.codecs.helpers import DTYPES, activations, assert_weight_gradient, rounding, roundtrip, token_shapes
from tests.families import BY_NAME, differing, step

codecs = st.builds(Pooled, st.integers(1, 5), st.sampled_from(("tokens", "image")))


def means(x: Tensor, window: int, axes: tuple[int, ...]) -> Tensor:
    """x in fp64, with every element replaced by the mean of its group."""
    y = x.double().clone()
    for axis in axes:
        y = torch.cat([part.mean(axis, keepdim=True).expand_as(part) for part in y.split(window, dim=axis)], dim=axis)
    return y


@settings(deadline=None, max_examples=150)
@given(activations(), codecs)
def test_every_element_is_its_groups_mean(x: Tensor, codec: Pooled) -> None:
    before = x.clone()
    tensors, meta = codec.pack(x)
    if x.dim() > 2:
        # a matrix is kept as it is, without a copy
        assert sum(t.untyped_storage().nbytes() for t in tensors) == codec.nbytes(x.shape, x.dtype)
    y = codec.unpack(tensors, meta)
    assert y.shape == x.shape and y.dtype == x.dtype and torch.equal(x, before)
    if x.dim() <= 2 or not x.numel():
        assert torch.equal(y, x)
        return
    axes = (-2,) if codec.layout == "tokens" else (-2, -1)
    # window or window^2 numbers are summed in fp32 and the mean is rounded once; each rounding error is relative to at
    # most the mean magnitude of the group
    unit = rounding(x.dtype) + codec.window ** len(axes) * torch.finfo(torch.float32).eps
    if x.dtype == torch.float64:
        unit = (codec.window ** len(axes) + 1) * torch.finfo(torch.float64).eps
    bound = 2 * unit * means(x.abs(), codec.window, axes) + torch.finfo(x.dtype).smallest_normal
    assert bool(((y.double() - means(x, codec.window, axes)).abs() <= bound).all())


@settings(deadline=None, max_examples=75)
@given(activations(token_shapes), st.integers(1, 5))
def test_weight_gradient_is_that_of_the_unpacked(x: Tensor, window: int) -> None:
    assert_weight_gradient(Pooled(window), x)


def test_no_mean_crosses_a_sequence() -> None:
    x = torch.zeros(3, 5, 4)
    x[1] = 7
    assert torch.equal(roundtrip(Pooled(2), x), x)
    assert torch.equal(roundtrip(Pooled(16), x), x)


def test_no_mean_crosses_an_image_or_a_channel() -> None:
    x = torch.arange(6.0).view(2, 3, 1, 1).expand(2, 3, 5, 7).contiguous()
    assert torch.equal(roundtrip(Pooled(16, "image"), x), x)


@settings(deadline=None, max_examples=75)
@given(activations(token_shapes), st.integers(1, 5), st.integers(0, 40), st.booleans())
def test_means_of_real_tokens(x: Tensor, window: int, padding: int, left: bool) -> None:
    """With padding on either side, whatever its values are, every mean is that of the real tokens of its group."""
    real = torch.ones(x.shape[:2], dtype=torch.bool)
    # the padding is at most as long as the sequence, and one token shorter in each following sequence
    for row in range(len(x)):
        gone = max(0, min(padding, x.size(1)) - row)
        real[row, :gone] = False
    real = real if left else real.flip(1)
    dirty = torch.where(real.unsqueeze(-1), x, math.nan).to(x.dtype)
    tensors, meta = Pooled(window).pack_real(dirty, real)
    assert sum(t.untyped_storage().nbytes() for t in tensors) == Pooled(window).nbytes(x.shape, x.dtype)
    y = Pooled(window).unpack(tensors, meta)
    counts = means(real.unsqueeze(-1).expand_as(x), window, (-2,))
    clean = x.double().masked_fill(~real.unsqueeze(-1), 0)
    expected = means(clean, window, (-2,)) / counts.clamp(min=1 / 64)
    magnitude = means(clean.abs(), window, (-2,)) / counts.clamp(min=1 / 64)
    # one rounding more than without a mask: the mean over the whole group is rounded before it is divided by the share
    # of real tokens
    unit = 2 * rounding(x.dtype) + (window + 2) * torch.finfo(torch.float32).eps
    if x.dtype == torch.float64:
        unit = (window + 4) * torch.finfo(torch.float64).eps
    # that mean may be smaller than fp16's smallest normal number
    assert bool(
        ((y.double() - expected).abs() <= 2 * unit * magnitude + window * torch.finfo(x.dtype).smallest_normal).all()
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("drop_padding", [False, True])
def test_padding_in_a_model(drop_padding: bool) -> None:
    """The values of padding tokens change no gradient if `drop_padding` is on."""
    family = BY_NAME["bert"]
    # 13 tokens, of which the last 4 and 8 are padding
    config = CompressionConfig.from_preset("pooled", drop_padding=drop_padding)
    found = []
    for token in (3, 4):
        batch = family.make_batch("right")
        batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, token)
        _, gradients = step(patch_model(family.build(), config), batch)
        found.append(gradients)
    assert bool(differing(*found)) != drop_padding


def test_what_is_missing_is_the_covariance_within_the_groups() -> None:
    x, dy = torch.randn(2, 12, 6, dtype=torch.float64), torch.randn(2, 12, 3, dtype=torch.float64)
    estimate = Pooled(4).grad_weight(dy, *Pooled(4).pack(x))
    assert estimate is not None
    within = torch.einsum("bto,btc->oc", dy - means(dy, 4, (-2,)), x - means(x, 4, (-2,)))
    torch.testing.assert_close(estimate + within, torch.einsum("bto,btc->oc", dy, x), rtol=1e-12, atol=1e-12)


def test_the_operations_shrink_with_the_window() -> None:
    x, dy = torch.randn(2, 64, 32), torch.randn(2, 64, 16)
    packed = Pooled(4).pack(x)
    with FlopCounterMode(display=False) as pooled:
        Pooled(4).grad_weight(dy, *packed)
    assert pooled.get_total_flops() == 2 * 128 * 32 * 16 // 4


def test_a_feature_map_of_squares_is_exact() -> None:
    x = torch.randn(2, 3, 4, 5).repeat_interleave(2, 2).repeat_interleave(2, 3)[..., :7, :9]
    tensors, meta = Pooled(2, "image").pack(x)
    assert tensors[0].shape == (2, 3, 4, 5)
    torch.testing.assert_close(Pooled(2, "image").unpack(tensors, meta), x, rtol=1e-6, atol=0)


@pytest.mark.parametrize("layout", ["tokens", "image"])
@pytest.mark.parametrize("poison", [math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_stays_so(layout: str, poison: float, dtype: torch.dtype) -> None:
    x = torch.randn(2, 7, 9).to(dtype)
    x[1, 6, 8] = poison
    assert not roundtrip(Pooled(2, layout), x)[1, 6, 8].isfinite()


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UnknownOptionError, match="'tokens', 'image'"):
        Pooled(2, "channels")
    with pytest.raises(ValueError, match="window >= 1"):
        Pooled(0)
    assert Pooled().linear_only and not Pooled().lossless
