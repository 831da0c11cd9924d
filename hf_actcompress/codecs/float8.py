"""8-bit floats, scaled per row or per group of features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..dispatch import implementation, kernel_wins, runs_kernel
from ..errors import UnknownOptionError
from .codec import Codec, TensorMeta, meta_of

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Float8(Codec):
    """fp8 with one scale per row, or per group of 16 or 128 neighbouring features.

    The relative error is at most 2^-4 (e4m3) or 2^-3 (e5m2) for values down to 2^-14 or 2^-29 of the group's largest
    magnitude. Int8 has one step for all values of a group; here small values keep more digits, and large ones fewer.

    Bytes: ``1 + 2 / group_size`` per element (the scale in bf16, rounded up); per row ``1 + 2 / D``.
    Bias: rounds to nearest, at most half a step.
    Source: FP8 formats (arXiv 2209.05433); activations in groups, COAT (arXiv 2410.19313).

    Args:
        format: "e4m3" or "e5m2".
        group_size: Features that share a scale; None: the whole row.

    Raises:
        UnknownOptionError: Another format.
        ValueError: A group size below 1.
    """

    takes_rows = True
    bits = 8
    format: str = "e4m3"
    group_size: int | None = 128

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UnknownOptionError("float8 format", self.format, FORMATS)
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"group_size >= 1 or None (the whole row); found {self.group_size}")

    def _group_size(self, features: int) -> int:
        return self.group_size or max(features, 1)

    def pack(self, x: Tensor) -> tuple[tuple[Tensor, ...], object]:
        meta = TensorMeta.of(x)
        return implementation("float8_pack", x)(x, FORMATS[self.format], self._group_size(meta.features)), meta

    def unpack(self, tensors: tuple[Tensor, ...], meta: object) -> Tensor:
        known = meta_of(meta)
        unpack = implementation("float8_unpack", tensors[0])
        rows: Tensor = unpack(*tensors, known.dtype, self._group_size(known.features))
        return rows.view(known.shape)

    def has_grad_weight(self, dy: Tensor) -> bool:
        return runs_kernel("float8_grad_weight", dy)

    def grad_weight(self, dy: Tensor, tensors: tuple[Tensor, ...], meta: object) -> Tensor | None:
        if not self.has_grad_weight(dy):
            # without the kernel, unpacking and torch's product are the fastest
            return None
        args = dy.reshape(-1, dy.size(-1)), *tensors, self._group_size(meta_of(meta).features)
        if not kernel_wins("float8_grad_weight", _unpacked_product, *args):
            return None
        out: Tensor = implementation("float8_grad_weight", dy)(*args)
        return out

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        x = TensorMeta(shape, dtype)
        return x.rows * (x.features + 2 * -(-x.features // self._group_size(x.features)))


def _unpacked_product(dy: Tensor, codes: Tensor, scale: Tensor, group_size: int) -> Tensor:
    """dW as it is computed if `grad_weight` returns None."""
    return dy.t().mm(implementation("float8_unpack", codes)(codes, scale, dy.dtype, group_size))
