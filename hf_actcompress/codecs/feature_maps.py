"""Applies codecs for tokens to the inputs of convolutions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..reference.rng import Generators
from .codec import Codec


@dataclass(frozen=True)
class MapsMeta:
    """The static half: the inner codec's, and the shape [B, C, H, W]."""

    inner: object
    shape: torch.Size


@dataclass(frozen=True)
class FeatureMaps(Codec):
    """Store feature maps [B, C, H, W] through a codec of tokens and their features.

    The last axis of a feature map is a line of pixels, which is short (7 in the last layers of a ResNet) and no vector
    of features. So one of two other layouts is handed to the codec: ``[B, C H W]``, an image is one row, or
    ``[B, H, W, C]``, a pixel is one row and its channels are the features.

    Bytes: the inner codec's, for that layout.
    Bias: the inner codec's. The weight gradient of a convolution is linear in x, so it is unbiased if the codec is.
    Source: DropIT (arXiv 2202.13808) selects among all entries of a convolution's input; ActNN (arXiv 2104.14129) forms
        its groups in the flattened images. Treating pixels as tokens is this implementation's own idea.

    Args:
        inner: What stores the rows; no codec of feature maps itself.
        pixels: Whether a pixel is one row; else an image is.
    """

    for_images = True
    inner: Codec
    pixels: bool

    @property
    def linear_only(self) -> bool:
        return self.inner.linear_only

    def pack(self, x: Tensor) -> tuple[tuple[Tensor, ...], object]:
        tensors, meta = self.inner.pack(x.permute(0, 2, 3, 1) if self.pixels else x.flatten(1))
        return tensors, MapsMeta(meta, x.shape)

    def unpack(self, tensors: tuple[Tensor, ...], meta: object) -> Tensor:
        assert isinstance(meta, MapsMeta)
        rows = self.inner.unpack(tensors, meta.inner)
        return rows.permute(0, 3, 1, 2).contiguous() if self.pixels else rows.view(meta.shape)

    def has_grad_weight(self, dy: Tensor) -> bool:
        return self.pixels and self.inner.has_grad_weight(dy)

    def grad_weight(self, dy: Tensor, tensors: tuple[Tensor, ...], meta: object) -> Tensor | None:
        """dW [O, C] of a convolution with kernels of one pixel, which is a linear layer on pixels; dy [B, O, H, W]."""
        if not self.has_grad_weight(dy):
            return None
        assert isinstance(meta, MapsMeta)
        return self.inner.grad_weight(dy.permute(0, 2, 3, 1), tensors, meta.inner)

    def keeping_sign(self) -> Codec:
        return replace(self, inner=self.inner.keeping_sign())

    def drawing_from(self, generators: Generators) -> Codec:
        return replace(self, inner=self.inner.drawing_from(generators))

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        b, c, h, w = shape
        return self.inner.nbytes(torch.Size((b, h, w, c) if self.pixels else (b, c * h * w)), dtype)


def on_feature_maps(codec: Codec) -> Codec:
    """The codec of the same method for feature maps [B, C, H, W]."""
    if codec.for_images or codec.lossless:
        return codec
    return codec.on_feature_maps() or FeatureMaps(codec, pixels=False)
