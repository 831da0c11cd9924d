"""Means of neighbouring tokens or pixels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...codecs.codec import Codec, TensorMeta, meta_of
from ...dispatch import implementation
from ...errors import UnknownOptionError

LAYOUTS = ("tokens", "image")


@dataclass(frozen=True)
class Pooled(Codec):
    """Keep the mean of each group of p neighbours; each of them comes back as the mean.

    Neighbours are tokens of one sequence, x ``[..., T, C]``: a group never reaches into the next sequence, and the last
    one of a sequence is shorter. A matrix ``[B, C]`` has no sequence and is kept as it is. The weight gradient is
    the product of the group sums of dy and the means: p times fewer rows. With layout "image", neighbours are the
    pixels of a p x p square of a feature map ``[..., H, W]``.

    The one group of a sequence in which real tokens and padding meet mixes the two, unless `pack_real` is told
    which are real, as under `drop_padding`. The groups of padding alone meet gradients that are zero.

    Bytes: ``b / p`` per element of b bytes; ``b / p^2`` of an image.
    Bias: yes: what is missing is exactly the covariance of dy and x within the groups; deterministic.
    Source: pooled activations (arXiv 2409.11902); tokens are this implementation's.

    Args:
        window: p.
        layout: "tokens" or "image".

    Raises:
        UnknownOptionError: Another layout.
        ValueError: A window below 1.
    """

    linear_only = True
    mixes_rows = True
    window: int = 2
    layout: str = "tokens"

    @property
    def for_images(self) -> bool:
        return self.layout == "image"

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise UnknownOptionError("layout", self.layout, LAYOUTS)
        if self.window < 1:
            raise ValueError(f"window >= 1; found {self.window}")

    def _pools(self, shape: torch.Size) -> bool:
        return len(shape) > 2 and shape.numel() > 0

    def on_feature_maps(self) -> Codec:
        return replace(self, layout="image")

    def pack_real(self, x: Tensor, real: Tensor) -> tuple[tuple[Tensor, ...], object]:
        if not self._pools(x.shape) or self.layout == "image":
            return self.pack(x)
        return (implementation("pooled_real_pack", x)(x, real, self.window),), TensorMeta.of(x)

    def pack(self, x: Tensor) -> tuple[tuple[Tensor, ...], object]:
        meta = TensorMeta.of(x)
        if not self._pools(x.shape):
            return (x,), meta
        name = "pooled_pack" if self.layout == "tokens" else "pooled_image_pack"
        return (implementation(name, x)(x, self.window),), meta

    def unpack(self, tensors: tuple[Tensor, ...], meta: object) -> Tensor:
        (pooled,), shape = tensors, meta_of(meta).shape
        if not self._pools(shape):
            return pooled
        x: Tensor
        if self.layout == "tokens":
            x = implementation("pooled_unpack", pooled)(pooled, shape[-2], self.window)
        else:
            x = implementation("pooled_image_unpack", pooled)(pooled, shape[-2], shape[-1], self.window)
        return x

    def grad_weight(self, dy: Tensor, tensors: tuple[Tensor, ...], meta: object) -> Tensor | None:
        if self.layout == "image" or not self._pools(meta_of(meta).shape):
            return None
        out: Tensor = implementation("pooled_grad_weight", dy)(dy, tensors[0], self.window)
        return out

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        if not self._pools(shape):
            return shape.numel() * dtype.itemsize
        *outer, rows, columns = shape
        columns = -(-columns // self.window) if self.layout == "image" else columns
        return torch.Size(outer).numel() * -(-rows // self.window) * columns * dtype.itemsize
