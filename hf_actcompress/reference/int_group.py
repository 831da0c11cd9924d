"""Integers of 8, 4, 3 or 2 bits with a scale and a zero point per group of features."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .bits import pack_rows, row_bytes, unpack_rows
from .groups import (
    bf16_below,
    chunk_rows,
    group_count,
    group_scale,
    in_groups,
    is_cpu,
    is_one_chunk,
    operands,
    row_chunks,
    row_slices,
    rows_features,
    spans,
    widened,
    within_range,
)
from .rng import uniform


def int_group_pack(
    x: Tensor, bits: int, group_size: int, stochastic: bool, channels: Tensor | None = None, keep_sign: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise x [..., D], R rows, in groups of `group_size` neighbouring features (the last may be shorter).

    Args:
        x: bf16, fp16, fp32 or fp64.
        bits: 8, 4, 3 or 2.
        group_size: Features that share a scale and a zero point.
        stochastic: Round up with the probability of the remainder, by the codecs' generator; else to nearest.
        channels: int64 [k], features that do not count for the ranges and whose codes nobody reads, or None.
        keep_sign: Whether what is decoded has to be above zero where x is; a code is then up to one step further off.

    Returns:
        codes uint8 [R, ceil(D bits / 8)] (with 3 bits [R, 3 ceil(D / 8)]), scale bf16 [R, n], zero bf16 [R, n].
    """
    rows, features = rows_features(x)
    size = min(features, group_size)
    if size and not features % size and is_one_chunk(x):
        # the whole of it at once, without a place to collect chunks in
        made = _quantise(x.reshape(rows, features), (0, features, size), bits, stochastic, channels, keep_sign)
        codes, scale, zero = made[0].byte(), *made[1:]
        # a row ends with its byte
        missing = row_bytes(features, bits) * 8 // bits - features
        return pack_rows(pad(codes, (0, missing)) if missing else codes, bits), scale, zero
    packed = x.new_empty(rows, row_bytes(features, bits), dtype=torch.uint8)
    scale = x.new_empty(rows, group_count(features, group_size), dtype=torch.bfloat16)
    zero = torch.empty_like(scale)
    for part, chunk in row_chunks(x):
        # a row ends with its byte
        codes = chunk.new_zeros(chunk.size(0), packed.size(1) * 8 // bits, dtype=torch.uint8)
        for span in spans(features, group_size):
            start, stop, _ = span
            at = slice(start // group_size, group_count(stop, group_size))
            made = _quantise(chunk, span, bits, stochastic, channels, keep_sign)
            codes[:, start:stop], scale[part, at], zero[part, at] = made
        packed[part] = pack_rows(codes, bits)
    return packed, scale, zero


def _quantise(
    rows: Tensor, span: tuple[int, int, int], bits: int, stochastic: bool, channels: Tensor | None, keep_sign: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [r, m], with a fraction that is to be cut off, of the features of a span; scale and zero bf16 [r, n].

    The range is rounded outwards to bf16 and the codes are made for the rounded one, so that no value is clipped and
    the rounding costs nothing but a step wider by less than 2^-7. A NaN or inf makes the group's scale NaN or inf.
    Codes are products with the reciprocal of the scale, which is off by a rounding: halfway between two codes, either
    may be taken.
    """
    levels = 2**bits - 1
    values = _grouped(rows, span)
    low, high = _ends(rows, span, channels) if channels is not None else _least_and_largest(values)
    base = widened(low, rows.dtype)
    numbers = operands(levels, base)
    if rows.dtype == torch.bfloat16:
        zero = low
    else:
        zero = bf16_below(base, numbers)
        base = widened(zero, rows.dtype)
    scale = group_scale(high - base, numbers)
    codes = (values - base).mul_(widened(scale, rows.dtype).reciprocal_().unsqueeze(-1))
    if stochastic:
        codes.add_(uniform(codes.shape, codes.dtype, codes.device))
    else:
        codes.round_()
    if stochastic or channels is not None:
        # to nearest, all that counted for the range is inside of it
        codes.clamp_(0, levels)
    if keep_sign:
        # the range is rounded outwards, so there is a code on the right side of zero; of skipped values nobody reads it
        decoded = codes.floor_() * scale.unsqueeze(-1) + zero
        codes.add_((values > 0).to(codes.dtype) - (decoded > 0).to(codes.dtype)).clamp_(0, levels)
    return codes.flatten(1), scale, zero.squeeze(-1)


def _grouped(rows: Tensor, span: tuple[int, int, int]) -> Tensor:
    start, stop, size = span
    return in_groups(rows if stop - start == rows.size(1) else rows[:, start:stop], size)


def _least_and_largest(values: Tensor) -> tuple[Tensor, Tensor]:
    # not aminmax: nine times slower on a CPU
    return values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)


def _ends(rows: Tensor, span: tuple[int, int, int], channels: Tensor) -> tuple[Tensor, Tensor]:
    """The same of the groups of a span without those features."""
    if torch.compiler.is_compiling():
        # which it writes into what reads it
        skipped = rows.new_zeros(rows.size(1), dtype=torch.bool).index_fill_(0, channels, True)
        low, high = (rows.masked_fill(skipped, end) for end in (torch.inf, -torch.inf))
        return _grouped(low, span).amin(-1, keepdim=True), _grouped(high, span).amax(-1, keepdim=True)
    without = rows.index_fill(1, channels, torch.inf)
    least = _grouped(without, span).amin(-1, keepdim=True)
    return least, _grouped(without.index_fill_(1, channels, -torch.inf), span).amax(-1, keepdim=True)


def outlier_channels(rows: Tensor, count: int) -> Tensor:
    """Which `count` features of rows [R, D] have the largest magnitudes, int64; one with a NaN counts as the largest."""
    if not is_cpu(rows.device):
        largest: Tensor = torch.linalg.vector_norm(rows, torch.inf, 0)
    # a CPU takes ten times as long for that
    elif is_one_chunk(rows):
        largest = rows.abs().amax(0)
    else:
        largest = torch.maximum(rows.amax(0), rows.amin(0).neg_())
    return largest.topk(count, sorted=False).indices


def int_group_unpack(
    packed: Tensor, scale: Tensor, zero: Tensor, features: int, dtype: torch.dtype, bits: int, group_size: int
) -> Tensor:
    """The rows [R, D] in `dtype` of what `int_group_pack` returned."""
    size = min(features, group_size)
    if size and not features % size and packed.size(0) <= chunk_rows(features, packed.device):
        block = _block(packed, bits, features, dtype)
        rows = _decoded(block, scale, zero, (0, features, size), dtype).flatten(1)
        return rows if rows.dtype == dtype else rows.to(dtype)
    out = packed.new_empty(packed.size(0), features, dtype=dtype)
    for part in row_slices(out.size(0), features, out.device) if features else ():
        block = _block(packed[part], bits, features, dtype)
        for span in spans(features, group_size):
            start, stop, _ = span
            at = slice(start // group_size, group_count(stop, group_size))
            out[part, start:stop] = _decoded(block, scale[part, at], zero[part, at], span, dtype).flatten(1)
    return out


def _block(packed: Tensor, bits: int, features: int, dtype: torch.dtype) -> Tensor:
    """Codes [r, D] in the work dtype, in memory of their own."""
    block = widened(unpack_rows(packed, bits), dtype)
    return block if block.size(1) == features else block[:, :features].contiguous()


def _decoded(block: Tensor, scale: Tensor, zero: Tensor, span: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """The features [r, n, size] of a span, written over their codes; scale and zero [r, n]."""
    values, step = _grouped(block, span), scale.unsqueeze(-1)
    if torch.compiler.is_compiling():
        values = values * step + zero.unsqueeze(-1)
    else:
        # the product is exact: fused or not, the sum is the same
        torch.addcmul(zero.unsqueeze(-1), values, step, out=values)
    return within_range(values, step, dtype)


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

    `values` [R, k] in dy's dtype stand in place of the features `channels` [k].
    """
    x = int_group_unpack(packed, scale, zero, features, dy.dtype, bits, group_size)
    if values is not None and channels is not None:
        x.index_copy_(1, channels.long(), values)
    return dy.t().mm(x)
