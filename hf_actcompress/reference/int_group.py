"""Integers of 8, 4, 3 or 2 bits with a scale and a zero point per group of features."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .bits import pack_rows, row_bytes, unpack_rows
from .groups import (
    bf16_above,
    bf16_below,
    chunk_rows,
    group_count,
    in_groups,
    is_one_chunk,
    row_chunks,
    row_slices,
    rows_features,
    spans,
    within_range,
    work_dtype,
)
from .rng import uniform

_TINY = torch.finfo(torch.bfloat16).tiny


def int_group_pack(
    x: Tensor, bits: int, group_size: int, stochastic: bool, skip: Tensor | None = None, keep_sign: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise x [..., D], R rows, in groups of `group_size` neighbouring features (the last may be shorter).

    Args:
        x: bf16, fp16, fp32 or fp64.
        bits: 8, 4, 3 or 2.
        group_size: Features that share a scale and a zero point.
        stochastic: Round up with the probability of the remainder, by the codecs' generator; else to nearest.
        skip: bool [D], features that do not count for the ranges, or None.
        keep_sign: Whether what is decoded has to be above zero where x is; a code is then up to one step further off.

    Returns:
        codes uint8 [R, ceil(D bits / 8)] (with 3 bits [R, 3 ceil(D / 8)]), scale bf16 [R, n], zero bf16 [R, n].
    """
    rows, features = rows_features(x)
    size = min(features, group_size)
    if size and not features % size and is_one_chunk(x):
        # the whole of it at once, without a place to collect chunks in
        skipped = skip.view(-1, size) if skip is not None else None
        values = x.reshape(rows, features // size, size).to(work_dtype(x.dtype))
        codes, scale, zero = _quantise(values, bits, stochastic, skipped, keep_sign)
        codes = codes.to(torch.uint8)
        # a row ends with its byte
        missing = row_bytes(features, bits) * 8 // bits - features
        return pack_rows(pad(codes, (0, missing)) if missing else codes, bits), scale, zero
    packed = x.new_empty(rows, row_bytes(features, bits), dtype=torch.uint8)
    scale = x.new_empty(rows, group_count(features, group_size), dtype=torch.bfloat16)
    zero = torch.empty_like(scale)
    for part, chunk in row_chunks(x):
        # a row ends with its byte
        codes = chunk.new_zeros(chunk.size(0), packed.size(1) * 8 // bits, dtype=torch.uint8)
        for start, stop, size in spans(features, group_size):
            at = slice(start // group_size, group_count(stop, group_size))
            skipped = skip[start:stop].view(-1, size) if skip is not None else None
            values = in_groups(chunk[:, start:stop].to(work_dtype(x.dtype)), size)
            made = _quantise(values, bits, stochastic, skipped, keep_sign)
            codes[:, start:stop], scale[part, at], zero[part, at] = made
        packed[part] = pack_rows(codes, bits)
    return packed, scale, zero


def _quantise(
    values: Tensor, bits: int, stochastic: bool, skipped: Tensor | None, keep_sign: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [r, n size] in the dtype of values [r, n, size]; scale and zero bf16 [r, n].

    The range is rounded outwards to bf16 and the codes are made for the rounded one, so that no value is clipped and
    the rounding costs nothing but a step wider by less than 2^-7. A NaN or inf makes the group's scale NaN or inf.
    """
    levels = 2**bits - 1
    if skipped is None:
        # not aminmax: nine times slower on a CPU
        low, high = values.amin(-1), values.amax(-1)
    else:
        low = values.masked_fill(skipped, torch.inf).amin(-1)
        high = values.masked_fill(skipped, -torch.inf).amax(-1)
    zero = bf16_below(low)
    # a tensor: a GPU divides by a number by multiplying with its reciprocal, whose last bit is another
    divisor = levels if high.device.type == "cpu" else torch.full_like(high, levels)
    scale = bf16_above((high - zero) / divisor).clamp_min(_TINY)
    positive = values > 0 if keep_sign else None
    values = (values - zero.unsqueeze(-1)).div_(scale.unsqueeze(-1))
    values = values.add_(uniform(values.shape, values.dtype, values.device)).floor_() if stochastic else values.round_()
    if stochastic or skipped is not None:
        # to nearest, all that counted for the range is inside of it
        values.clamp_(0, levels)
    if positive is not None:
        # the range is rounded outwards, so there is a code on the right side of zero; of skipped values nobody reads it
        decoded = values * scale.unsqueeze(-1) + zero.unsqueeze(-1)
        values.add_(positive.to(values.dtype) - (decoded > 0).to(values.dtype)).clamp_(0, levels)
    return values.flatten(1), scale, zero


def int_group_unpack(
    packed: Tensor, scale: Tensor, zero: Tensor, features: int, dtype: torch.dtype, bits: int, group_size: int
) -> Tensor:
    """The rows [R, D] in `dtype` of what `int_group_pack` returned."""
    size = min(features, group_size)
    if size and not features % size and packed.size(0) <= chunk_rows(features, packed.device):
        step = scale.unsqueeze(-1)
        block = unpack_rows(packed, bits)
        block = block if block.size(1) == features else block[:, :features]
        values = block.view(-1, features // size, size).to(work_dtype(dtype))
        values.mul_(step).add_(zero.unsqueeze(-1))
        return within_range(values, step, dtype).flatten(1).to(dtype)
    out = packed.new_empty(packed.size(0), features, dtype=dtype)
    for part in row_slices(out.size(0), features, out.device) if features else ():
        block = unpack_rows(packed[part], bits)
        for start, stop, size in spans(features, group_size):
            at = slice(start // group_size, group_count(stop, group_size))
            step = scale[part, at].unsqueeze(-1)
            values = in_groups(block[:, start:stop].to(work_dtype(dtype)), size)
            values.mul_(step).add_(zero[part, at].unsqueeze(-1))
            out[part, start:stop] = within_range(values, step, dtype).flatten(1)
    return out


def int_group_grad_weight(
    dy: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero: Tensor,
    features: int,
    bits: int,
    group_size: int,
    values: Tensor | None = None,
    channels: Tensor | None = None,
) -> Tensor:
    """dW [O, D] = dy^T x of dy [R, O] and what `int_group_pack` returned.

    `values` [R, k] in dy's dtype stand in place of the features `channels` int32 [k].
    """
    x = int_group_unpack(packed, scale, zero, features, dy.dtype, bits, group_size)
    if values is not None and channels is not None:
        x.index_copy_(1, channels.long(), values)
    return dy.t().mm(x)
