"""NaN and inf in formats that keep a part of a tensor: the gradient must be NaN wherever stock's is."""

from __future__ import annotations

import torch
from torch import Tensor


def spoiled(values: Tensor) -> Tensor:
    """`values` itself, made NaN as a whole if one value is NaN or inf, so that none is lost. It takes no extra byte."""
    return values.add_((values * 0).sum())


def nothing(values: Tensor, *shape: int) -> Tensor:
    """A tensor of that shape for the elements that were not kept: zeros, or NaN if `spoiled` made `values` NaN."""
    if values.numel() == 0:
        return values.new_zeros(shape)
    nan = torch.full_like(values[:1].flatten()[:1], torch.nan)
    return torch.where(values[:1].flatten()[:1].isnan(), nan, 0).expand(shape).contiguous()
