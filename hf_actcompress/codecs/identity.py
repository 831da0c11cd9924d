"""The identity codec: the tensor itself, no copy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .codec import Codec


@dataclass(frozen=True)
class Identity(Codec):
    """Keep a tensor as it is: `element_size()` bytes per element, exact, shared with all others that keep it."""

    takes_rows = True
    lossless = True

    def pack(self, x: Tensor) -> tuple[tuple[Tensor, ...], object]:
        return (x,), None

    def unpack(self, tensors: tuple[Tensor, ...], meta: object) -> Tensor:
        return tensors[0]

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return shape.numel() * dtype.itemsize
