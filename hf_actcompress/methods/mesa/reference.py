"""Integers of 8 bits in given ranges: one range per group of features, for all rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.groups import keep_signs_, row_slices, spans, within_range, work_dtype
from ...reference.rng import uniform

LEVELS = 255


def group_ranges(x: Tensor, group_size: int) -> Tensor:
    """The least and the largest value [2, n] of each group of features over all rows of x [R, D], in the work dtype."""
    low, high = x.amin(0), x.amax(0)
    parts = []
    for start, stop, size in spans(x.size(1), group_size):
        parts.append(torch.stack((low[start:stop].view(-1, size).amin(1), high[start:stop].view(-1, size).amax(1))))
    return torch.cat(parts, 1).to(work_dtype(x.dtype))


def int_running_pack(x: Tensor, ranges: Tensor, group_size: int, keep_sign: bool = False) -> Tensor:
    """Codes uint8 [R, D] of x [R, D] with stochastic rounding. Values outside of their range [2, n] are clamped.

    With `keep_sign` a decoded value is above zero exactly if x is, where the range has such values; a code may then be
    one step further away.
    """
    zero, scale = spread(ranges, x.size(1), group_size)
    inverse = scale.reciprocal()
    codes = x.new_empty(x.shape, dtype=torch.uint8)
    for part in row_slices(x.size(0), x.size(1), x.device):
        values = x[part].to(work_dtype(x.dtype), copy=True).sub_(zero).mul_(inverse)
        values.add_(uniform(values.shape, values.dtype, values.device)).floor_().clamp_(0, LEVELS)
        if keep_sign:
            keep_signs_(values, x[part], scale, zero, LEVELS)
        codes[part] = values
    return codes


def int_running_unpack(codes: Tensor, ranges: Tensor, dtype: torch.dtype, group_size: int) -> Tensor:
    """The rows [R, D] in `dtype`. A group whose range is not finite is NaN."""
    zero, scale = spread(ranges, codes.size(1), group_size)
    out = codes.new_empty(codes.shape, dtype=dtype)
    for part in row_slices(codes.size(0), codes.size(1), codes.device):
        values = codes[part].to(scale.dtype).mul_(scale).add_(zero)
        out[part] = within_range(values, scale, dtype)
    return out


def spread(ranges: Tensor, features: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Zero point and step of every feature [D]; NaN for a range that is not finite."""
    low, high = ranges.repeat_interleave(group_size, 1)[:, :features]
    nothing = (high - low) * 0
    return low + nothing, ((high - low) / LEVELS).clamp_min(torch.finfo(torch.float32).tiny)
