"""Checks for what other packages add."""

from __future__ import annotations

import torch
from torch import Tensor

from .codecs import Codec
from .codecs.codec import DTYPES

_SIZES = ((), (7,), (0, 5), (3, 64), (2, 3, 33), (4, 5, 128))


def check_codec(codec: Codec) -> None:
    """Try a codec on the shapes, dtypes and layouts that activations have, and compare with what it promises.

    Args:
        codec: The codec. If it is lossy, only shapes, dtypes and bytes are checked, and not how much it loses.

    Raises:
        AssertionError: Says which promise was broken, for which tensor.
    """
    assert codec == codec and hash(codec) == hash(codec), f"{codec!r} is not equal to itself"
    for dtype in DTYPES:
        for size in _SIZES:
            x = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
            _check(codec, x, f"{dtype} {tuple(size)}")
    wide = torch.randn(4, 128)
    _check(codec, wide.t(), "a transposed tensor")
    _check(codec, wide[:, ::2], "a tensor with gaps")
    _check(codec, wide[:1].expand(4, 128), "an expanded tensor")


def _check(codec: Codec, x: Tensor, what: str) -> None:
    before = x.clone()
    tensors, meta = codec.pack(x)
    assert isinstance(tensors, tuple), f"{what}: pack returns (a tuple of tensors, static data)"
    assert torch.equal(x, before), f"{what}: pack wrote into its argument"
    own = x.untyped_storage().data_ptr()
    held = sum(t.untyped_storage().nbytes() for t in tensors if t.untyped_storage().data_ptr() != own)
    assert held <= codec.nbytes(x.shape, x.dtype), f"{what}: it holds {held} bytes and says fewer"
    y = codec.unpack(tensors, meta)
    assert y.shape == x.shape, f"{what}: came back as {tuple(y.shape)}"
    assert y.dtype == x.dtype, f"{what}: came back as {y.dtype}"
    if codec.lossless:
        assert torch.equal(y, x), f"{what}: a lossless codec changed a value"
    again = codec.unpack(tensors, meta)
    assert torch.equal(again, y), f"{what}: a second unpack gave something else"
