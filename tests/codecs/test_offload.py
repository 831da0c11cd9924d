"""Offload packs with an inner codec and keeps the same bytes in host memory."""

from __future__ import annotations

import pytest
import torch

from hf_actcompress.codecs import Codec, Float8, Identity, IntGroup, Offload, offload
from hf_actcompress.codecs.offload import lane_of
from hf_actcompress.codecs.table import CODECS
from hf_actcompress.methods.pooled.codec import Pooled
from hf_actcompress.methods.row_sample.codec import RowSample
from hf_actcompress.methods.topk.codec import TopK
from hf_actcompress.ops import linear
from hf_actcompress.reference import seed_codecs
from tests.codecs.helpers import DTYPES

INNER = [Identity(), IntGroup(8), IntGroup(4, outliers=2), Float8(), TopK(0.1), Pooled(2), RowSample(0.3)]
inner_codecs = pytest.mark.parametrize("inner", INNER, ids=str)


@inner_codecs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_the_inner_codec_and_a_copy(inner: Codec, dtype: torch.dtype) -> None:
    x = torch.randn(2, 9, 64).to(dtype)
    dy = torch.randn(2, 9, 3).to(dtype)
    codec = Offload(inner)
    seed_codecs(0)
    tensors, meta = codec.pack(x)
    seed_codecs(0)
    expected, inner_meta = inner.pack(x)
    for ours, theirs in zip(tensors, expected, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        assert ours.data_ptr() != x.data_ptr()
    assert torch.equal(codec.unpack(tensors, meta), inner.unpack(expected, inner_meta))
    ours_dw, theirs_dw = codec.grad_weight(dy, tensors, meta), inner.grad_weight(dy, expected, inner_meta)
    assert (ours_dw is None) == (theirs_dw is None)
    if ours_dw is not None and theirs_dw is not None:
        assert torch.equal(ours_dw, theirs_dw)
    assert sum(t.untyped_storage().nbytes() for t in tensors) == codec.nbytes(x.shape, dtype)
    assert (codec.lossless, codec.linear_only) == (inner.lossless, inner.linear_only)


def test_a_view_takes_its_own_bytes_along() -> None:
    x = torch.randn(100, 64)[::10, :8]
    tensors, meta = Offload().pack(x)
    assert tensors[0].untyped_storage().nbytes() == x.numel() * 4
    assert torch.equal(Offload().unpack(tensors, meta), x)


def test_equal_formats_are_equal() -> None:
    assert Offload(IntGroup(8)) == CODECS["offload_int8"] and hash(Offload()) == hash(CODECS["offload"])


@pytest.mark.gpu
@inner_codecs
def test_on_a_device(inner: Codec) -> None:
    x = torch.randn(64, 128, 256, device="cuda", dtype=torch.bfloat16)
    codec = Offload(inner)
    seed_codecs(0)
    expected = inner.unpack(*inner.pack(x))
    seed_codecs(0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    tensors, meta = codec.pack(x)
    torch.cuda.synchronize()
    assert all(not t.is_cuda and t.is_pinned() for t in tensors)
    # x is freed and its memory is written again at once: the copies must have read it before that
    del x
    noise = torch.full((64, 128, 256), 7.0, device="cuda", dtype=torch.bfloat16)
    y = codec.unpack(tensors, meta)
    assert y.is_cuda and torch.equal(y, expected)
    del noise, y
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.gpu
@inner_codecs
def test_a_backward_on_a_device(inner: Codec) -> None:
    """Copies run beside the products. The gradients are the inner codec's, and no copy is left afterwards."""
    inputs = [torch.randn(shape, device="cuda").requires_grad_() for shape in [(4, 512, 256)] + [(256, 256)] * 12]

    def gradients(codec: Codec) -> tuple[torch.Tensor, ...]:
        seed_codecs(0)
        leaf, *weights = inputs
        # what is packed of a tensor stays with it: a leaf's would be used again by the next call
        x = leaf * 1
        for weight in weights:
            x = linear(x, weight, codec=codec).sin()
        return torch.autograd.grad(x.sum(), inputs)

    expected = gradients(inner)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(gradients(Offload(inner)), expected, strict=True))
    lane = lane_of(inputs[0].device)
    assert lane is not None and not lane._ahead and not lane._latest


@pytest.mark.skipif(torch.cuda.is_available(), reason="pinned memory can be had")
def test_without_pinned_memory_the_copy_goes_to_pageable_memory(caplog: pytest.LogCaptureFixture) -> None:
    """Without a CUDA device no memory can be pinned, which fails as it does where pinned memory has run out."""
    x = torch.randn(4, 6).t()
    offload._say_unpinned.cache_clear()
    first, second = offload._host_memory(x), offload._host_memory(x)
    assert not first.is_pinned() and first.shape == second.shape == x.shape and first.stride() == x.stride()
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "pageable" in caplog.text
