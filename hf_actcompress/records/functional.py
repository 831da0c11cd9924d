"""Finds which function of torch is saving a tensor, and what that says about the tensor.

`frames` is how many frames of the call stack lie between the caller of a function of this file and the function that
saves.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from torch import Tensor

from ..reference.bits import pack_mask, unpack_mask
from .record import Derived, Recipe, stored_exact

_DROPOUT = torch.nn.functional.dropout.__code__
_MAX_POOL = torch.nn.functional._max_pool2d.__code__  # type: ignore[attr-defined]


def smaller_record(x: Tensor, frames: int) -> Derived | None:
    """The record of x in fewer bytes, if a known function of torch saves x now; None for all other tensors.

    It knows the mask of a dropout, which is stored as bits, and the indices of a max-pooling of images, which are
    stored in a narrower integer type.
    """
    frame = sys._getframe(frames + 1)
    if frame.f_code is _MAX_POOL and x.dtype == torch.int64:
        # each index is that of a pixel in its image
        height, width = frame.f_locals["input"].shape[-2:]
        narrow = x.to(torch.int16 if height * width <= 2**15 else torch.int32)
        return Derived(Recipe(torch.Tensor.long), (stored_exact(narrow),))
    if frame.f_code is not _DROPOUT or x.grad_fn is not None or not x.is_contiguous():
        return None
    given, p = frame.f_locals["input"], frame.f_locals["p"]
    if x.shape != given.shape or p >= 1:
        return None
    unpacked = partial(_unpacked, shape=x.shape, dtype=x.dtype, keep=1 - p)
    return Derived(Recipe(unpacked), (stored_exact(pack_mask(x.bool())),))


def _unpacked(bits: Tensor, shape: torch.Size, dtype: torch.dtype, keep: float) -> Tensor:
    """Recompute function of a dropout's mask; on a CPU it is the numbers 0 and 1 / keep."""
    mask = unpack_mask(bits, shape)
    return mask if dtype == torch.bool else mask.to(dtype).div_(keep)
