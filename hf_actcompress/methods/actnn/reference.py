"""Integers whose number of bits differs between samples: those with wide ranges get more, and the mean is fixed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...reference.bits import pack_rows, unpack_rows
from ...reference.groups import (
    bf16_below,
    group_count,
    group_scale,
    in_groups,
    keep_signs_,
    operands,
    row_slices,
    spans,
    widened,
    within_range,
)
from ...reference.rng import uniform

MOST = 8


class Ranked(NamedTuple):
    """Packed samples [N, M] with n groups each.

    Attributes:
        planes: uint8 [N bits, ceil(M / 8)]; a sample of b bits has b rows, the first of which are its lowest bits.
        extent: bf16 [N, n], the range of each group, rounded up.
        zero: bf16 [N, n], the least value of each group, rounded down.
        widths: uint8 [N], the bits of each sample; their mean is `bits`.
    """

    planes: Tensor
    extent: Tensor
    zero: Tensor
    widths: Tensor


def int_ranked_pack(x: Tensor, bits: int, group_size: int, keep_sign: bool = False) -> Ranked:
    """Quantise x [N, M], not empty, with stochastic rounding, in groups of neighbours (the last may be shorter).

    With `keep_sign` a decoded value is above zero exactly if x is (`keep_signs_` has the exception); a code may then be
    one step further away, and no sample gets less than 2 bits, unless `bits` is 1.
    """
    extent, zero = _ranges(x, group_size)
    widths = allocated(_sensitivity(extent, x.size(1), group_size), bits, min(2, bits) if keep_sign else 1)
    codes = x.new_zeros(x.size(0), -(-x.size(1) // 8) * 8, dtype=torch.uint8)
    for part in row_slices(x.size(0), x.size(1), x.device):
        for start, stop, size in spans(x.size(1), group_size):
            values = in_groups(x[part, start:stop], size)
            made = _codes(values, *_steps(widths[part], extent[part], zero[part], start, stop, group_size), keep_sign)
            codes[part, start:stop] = made.flatten(1)
    owners, shifts = _rows(widths, bits)
    planes = codes.new_empty(owners.size(0), codes.size(1) // 8)
    for part in row_slices(owners.size(0), codes.size(1), x.device):
        planes[part] = pack_rows((codes.index_select(0, owners[part]) >> shifts[part, None]) & 1, 1)
    return Ranked(planes, extent, zero, widths)


def int_ranked_unpack(packed: Ranked, features: int, dtype: torch.dtype, bits: int, group_size: int) -> Tensor:
    """The samples [N, features] in `dtype`. A group whose range is not finite is NaN."""
    planes, extent, zero, widths = packed
    owners, shifts = _rows(widths, bits)
    codes = planes.new_zeros(widths.size(0), planes.size(1) * 8)
    for part in row_slices(owners.size(0), codes.size(1), planes.device):
        codes.index_add_(0, owners[part], unpack_rows(planes[part], 1) << shifts[part, None])
    out = planes.new_empty(widths.size(0), features, dtype=dtype)
    for part in row_slices(out.size(0), features, planes.device):
        for start, stop, size in spans(features, group_size):
            _, step, base = _steps(widths[part], extent[part], zero[part], start, stop, group_size)
            values = in_groups(codes[part, start:stop], size).to(step.dtype).mul_(step).add_(base)
            out[part, start:stop] = within_range(values, step, dtype).flatten(1)
    return out


def _codes(values: Tensor, levels: Tensor, step: Tensor, base: Tensor, keep_sign: bool) -> Tensor:
    """Whole numbers [r, n, size] up to `levels` for values [r, n, size]."""
    made = (values - base).mul_(step.reciprocal())
    made.add_(uniform(made.shape, made.dtype, made.device)).floor_().clamp_(min=0)
    if keep_sign:
        keep_signs_(made, values, step, base, 2**MOST - 1)
    return torch.minimum(made, levels, out=made)


def allocated(sensitivity: Tensor, bits: int, least: int = 1) -> Tensor:
    """The bits uint8 [N] of each sample, from `least` to 8, whose mean is `bits`: the sum of variances is the smallest.

    A sample with b bits has a variance in proportion to its sensitivity [N] over (2^b - 1)^2. One more bit takes less
    off this the more bits there are. So the bits are those that take the most off, over all samples.
    """
    before = torch.arange(least, MOST, dtype=torch.float32, device=sensitivity.device)
    falls = (before.exp2() - 1) ** -2 - ((before + 1).exp2() - 1) ** -2
    count = sensitivity.size(0)
    chosen = torch.outer(sensitivity, falls).view(-1).topk((bits - least) * count, sorted=False).indices
    widths = torch.full_like(sensitivity, least, dtype=torch.uint8)
    return widths.index_add_(0, chosen // (MOST - least), torch.ones_like(chosen, dtype=torch.uint8))


def _ranges(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """extent and zero of each group, rounded outwards to bf16, so that no value is clamped."""
    extent = x.new_empty(x.size(0), group_count(x.size(1), group_size), dtype=torch.bfloat16)
    zero = torch.empty_like(extent)
    for start, stop, size in spans(x.size(1), group_size):
        values = in_groups(x[:, start:stop], size)
        low, high = (widened(end, x.dtype) for end in (values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)))
        numbers = operands(1.0, low)
        base = bf16_below(low, numbers)
        at = slice(start // group_size, group_count(stop, group_size))
        zero[:, at], extent[:, at] = base.squeeze(-1), group_scale(high - base, numbers)
    return extent, zero


def _sensitivity(extent: Tensor, features: int, group_size: int) -> Tensor:
    """The squared range [N] that each sample's elements have in sum, by the extents [N, n] of its groups."""
    squares = extent.float().square()
    last = features - (extent.size(1) - 1) * group_size
    return squares[:, :-1].sum(1) * group_size + squares[:, -1] * last


def _steps(
    widths: Tensor, extent: Tensor, zero: Tensor, start: int, stop: int, group_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The largest code [r, 1, 1] of each sample; step and zero point [r, n, 1] of the groups between two features."""
    levels = widths.float().exp2().sub_(1).view(-1, 1, 1)
    at = slice(start // group_size, group_count(stop, group_size))
    return levels, extent[:, at].float().unsqueeze(-1) / levels, zero[:, at].float().unsqueeze(-1)


def _rows(widths: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Of each row of the planes: the sample int64 [N bits], and which of its bits uint8 [N bits]."""
    ends = widths.cumsum(0)
    rows = torch.arange(bits * widths.size(0), device=widths.device)
    owners = torch.searchsorted(ends, rows, right=True)
    return owners, (rows - (ends - widths)[owners]).to(torch.uint8)
