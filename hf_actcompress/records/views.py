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


class View:
    """Recompute function of a view of a tensor that was rebuilt. It makes no copy."""

    __slots__ = ("shape", "stride")

    def __init__(self, shape: torch.Size, stride: tuple[int, ...]) -> None:
        self.shape, self.stride = shape, stride

    def __call__(self, base: Tensor) -> Tensor:
        base = base.contiguous()
        if dense(self.shape, self.stride):
            return base.view(self.shape)
        return base.as_strided(self.shape, self.stride)


class SameMemory(View):
    """Recompute function of a view of a tensor that was rebuilt in the order in memory that it had."""

    __slots__ = ()

    def __call__(self, base: Tensor) -> Tensor:
        return base.as_strided(self.shape, self.stride, int(base.storage_offset()))


class TokensFirst:
    """Recompute function of tokens [B, S, H, D] or [B, S, C] from a function that makes [B, H, S, D] or [B, C, S]."""

    __slots__ = ("recompute",)

    def __init__(self, recompute: Callable[..., Tensor]) -> None:
        self.recompute = recompute

    def __call__(self, *sources: Tensor) -> Tensor:
        return self.recompute(*sources).transpose(1, 2).contiguous()


class PixelsFirst(TokensFirst):
    """Recompute function of maps [B, H, W, C] from a function that makes [B, C, H, W]."""

    __slots__ = ()

    def __call__(self, *sources: Tensor) -> Tensor:
        return self.recompute(*sources).permute(0, 2, 3, 1).contiguous()
