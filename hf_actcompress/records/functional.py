"""Finds which function of torch is saving a tensor, and what that says about the tensor.

`frames` is how many frames of the call stack lie between the caller of a function of this file and the function that
saves.
"""

from __future__ import annotations

import sys

import torch
import torch.utils.checkpoint
from torch import Tensor

_DROPOUT = torch.nn.functional.dropout.__code__
_MAX_POOL = torch.nn.functional._max_pool2d.__code__  # type: ignore[attr-defined]


def dropout_of_mask(x: Tensor, frames: int) -> tuple[Tensor, float] | None:
    """The input and the rate of the `torch.nn.functional.dropout` that saves x as its mask now; None if none does."""
    frame = sys._getframe(frames + 1)
    if frame.f_code is not _DROPOUT or x.grad_fn is not None or not x.is_contiguous():
        return None
    given, p = frame.f_locals["input"], frame.f_locals["p"]
    return None if x.shape != given.shape or p >= 1 else (given, p)


def narrow_indices(x: Tensor, frames: int) -> Tensor | None:
    """The indices x, in a narrower integer type, if a max-pooling of images saves them now; None for other tensors."""
    if x.dtype != torch.int64:
        return None
    frame = sys._getframe(frames + 1)
    if frame.f_code is not _MAX_POOL:
        return None
    # each index is that of a pixel in its image
    height, width = frame.f_locals["input"].shape[-2:]
    return x.to(torch.int16 if height * width <= 2**15 else torch.int32)


def is_saved_by_checkpointing(frames: int) -> bool:
    """Whether torch's checkpointing saves a tensor now."""
    caller = sys._getframe(frames + 1).f_back
    return caller is not None and caller.f_code.co_filename == torch.utils.checkpoint.__file__


def widened(x: Tensor) -> Tensor:
    """Recompute function of indices that `narrow_indices` has stored in fewer bytes."""
    return x.long()
