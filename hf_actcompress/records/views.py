"""One tensor as another view of the same data: which part of the memory it sees, and how it is rebuilt."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def dense(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Whether a tensor of that shape and these strides is contiguous."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def extent(x: Tensor) -> int:
    """The number of storage elements that x spans, from its first element to its last."""
    return 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))


def viewed(base: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """Recompute function of a view of a tensor that was rebuilt. It makes no copy."""
    base = base.contiguous()
    return base.view(shape) if dense(shape, stride) else base.as_strided(shape, stride)


def tokens_first(recompute: Callable[..., Tensor], *sources: Tensor) -> Tensor:
    """Recompute function of tokens [B, S, H, D] or [B, S, C] from a function that makes [B, H, S, D] or [B, C, S]."""
    return recompute(*sources).transpose(1, 2).contiguous()


def pixels_first(recompute: Callable[..., Tensor], *sources: Tensor) -> Tensor:
    """Recompute function of maps [B, H, W, C] from a function that makes [B, C, H, W]."""
    return recompute(*sources).permute(0, 2, 3, 1).contiguous()
