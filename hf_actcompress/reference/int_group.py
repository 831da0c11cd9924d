"""Integers of 8, 4, 3 or 2 bits with a scale and a zero point per group of features."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..compiling import is_compiling
from .bits import pack_rows, row_bytes, unpack_rows
from .groups import (
    bf16_below,
    group_count,
    group_scale,
    in_groups,
    is_cpu,
    is_one_chunk,
    keep_signs_,
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
        bits: 8, 5, 4, 3 or 2.
        group_size: Features that share a scale and a zero point.
        stochastic: Round up with a probability equal to the remainder, by the codecs' generator; else round to nearest.
        channels: int64 [k], features that are left out of the ranges and whose codes are not read, or None.
        keep_sign: Whether a decoded value must be above zero exactly if x is; a code may then be one step further away.

    Returns:
        codes uint8 [R, ceil(D bits / 8)] (with 3 and 5 bits [R, bits ceil(D / 8)]); scale and zero bf16 [R, n].
    """
    rows, features = rows_features(x)
    size = min(features, group_size)
    if size and not features % size and is_one_chunk(rows, features, x.device):
        # all rows at once, which needs no memory to collect chunks in
        values = x.reshape(rows, features // size, size)
        without = None if channels is None else (x.reshape(rows, features), 0, channels)
        made, scale, zero = _quantise(values, bits, stochastic, keep_sign, without)
        codes = made.byte().view(rows, features)
        if bits == 8:
            return codes, scale, zero
        # a row ends with a whole byte
        missing = row_bytes(features, bits) * 8 // bits - features
        return pack_rows(pad(codes, (0, missing)) if missing else codes, bits), scale, zero
    packed = x.new_empty(rows, row_bytes(features, bits), dtype=torch.uint8)
    scale = x.new_empty(rows, group_count(features, group_size), dtype=torch.bfloat16)
    zero = torch.empty_like(scale)
    for part, chunk in row_chunks(x):
        # a row ends with a whole byte
        codes = chunk.new_zeros(chunk.size(0), packed.size(1) * 8 // bits, dtype=torch.uint8)
        for span in spans(features, group_size):
            at = slice(span[0] // group_size, group_count(span[1], group_size))
            without = None if channels is None else (chunk, span[0], channels)
            made, scale[part, at], zero[part, at] = _quantise(_of(chunk, span), bits, stochastic, keep_sign, without)
            codes[:, span[0] : span[1]] = made.flatten(1)
        packed[part] = pack_rows(codes, bits)
    return packed, scale, zero


def _quantise(
    values: Tensor, bits: int, stochastic: bool, keep_sign: bool, without: tuple[Tensor, int, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [r, n, size], with a fraction that is still to be cut off, and scale and zero bf16 [r, n].

    The range is rounded outwards to bf16, and codes are computed for the rounded range. So no value is clipped, and the
    rounding only makes a step wider by less than 2^-7. A NaN or inf makes the group's scale NaN or inf. Codes are
    products with the scale's reciprocal, which has a rounding error: a value halfway between two codes may get either.
    `without`: the further arguments of `_ends_without` if some channels do not count.
    """
    levels, dtype = 2**bits - 1, values.dtype
    if without is None:
        # not aminmax, which is nine times slower on a CPU
        low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    else:
        low, high = _ends_without(values, *without)
    base = widened(low, dtype)
    numbers = operands(levels, base)
    if dtype == torch.bfloat16:
        zero = low
    else:
        base = bf16_below(base, numbers)
        zero = base.bfloat16()
    scale = group_scale(high - base, numbers)
    codes = (values - base).mul_(widened(scale, dtype).reciprocal_().unsqueeze(-1))
    if stochastic:
        codes.add_(uniform(codes.shape, codes.dtype, codes.device))
    else:
        codes.round_()
    if stochastic or without is not None:
        # under rounding to nearest, every value that counts for the range is inside of it
        codes.clamp_(0, levels)
    if keep_sign:
        # the range was rounded outwards, so a code exists on the right side of zero; codes of skipped values are not
        # read
        keep_signs_(codes.floor_(), values, scale.unsqueeze(-1), zero, levels)
    return codes, scale, zero.squeeze(-1)


def _of(rows: Tensor, span: tuple[int, int, int]) -> Tensor:
    """A view [r, n, size] of the features of a span of rows [r, D]."""
    start, stop, size = span
    return in_groups(rows[:, start:stop], size)


def _ends_without(values: Tensor, rows: Tensor, start: int, channels: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest [r, n, 1] of values [r, n, size], leaving out `channels` of rows [r, D]."""

    shape = values.shape
    count = shape[1] * shape[2]

    def grouped(x: Tensor) -> Tensor:
        return (x if x.size(1) == count else x[:, start : start + count]).view(shape)

    if is_compiling():
        # the compiler fuses this mask into the ops that read it
        skipped = rows.new_zeros(rows.size(1), dtype=torch.bool).index_fill_(0, channels, True)
        low, high = (rows.masked_fill(skipped, end) for end in (torch.inf, -torch.inf))
        return grouped(low).amin(-1, keepdim=True), grouped(high).amax(-1, keepdim=True)
    rest = rows.index_fill(1, channels, torch.inf)
    low = grouped(rest).amin(-1, keepdim=True)
    return low, grouped(rest.index_fill_(1, channels, -torch.inf)).amax(-1, keepdim=True)


def outlier_channels(rows: Tensor, count: int) -> Tensor:
    """The `count` features of rows [R, D] with the largest magnitudes, int64; a NaN counts as the largest."""
    if not is_cpu(rows.device):
        largest: Tensor = torch.linalg.vector_norm(rows, torch.inf, 0)
    # no vector_norm on a CPU, where it takes ten times as long
    elif is_one_chunk(rows.size(0), rows.size(1), rows.device):
        largest = rows.abs().amax(0)
    else:
        largest = torch.maximum(rows.amax(0), rows.amin(0).neg_())
    return largest.topk(count, sorted=False).indices


def int_group_unpack(
    packed: Tensor, scale: Tensor, zero: Tensor, features: int, dtype: torch.dtype, bits: int, group_size: int
) -> Tensor:
    """The rows [R, D] in `dtype`, decoded from what `int_group_pack` returned."""
    size, rows = min(features, group_size), packed.size(0)
    if size and not features % size and is_one_chunk(rows, features, packed.device):
        values = _block(packed, bits, features, dtype).view(rows, features // size, size)
        made = _decode(values, scale.unsqueeze(-1), zero.unsqueeze(-1), dtype).view(rows, features)
        return made if made.dtype == dtype else made.to(dtype)
    out = packed.new_empty(rows, features, dtype=dtype)
    for part in row_slices(rows, features, out.device) if features else ():
        block = _block(packed[part], bits, features, dtype)
        for span in spans(features, group_size):
            at = slice(span[0] // group_size, group_count(span[1], group_size))
            step, zeros = scale[part, at].unsqueeze(-1), zero[part, at].unsqueeze(-1)
            out[part, span[0] : span[1]] = _decode(_of(block, span), step, zeros, dtype).flatten(1)
    return out


def _block(packed: Tensor, bits: int, features: int, dtype: torch.dtype) -> Tensor:
    """Codes [r, D] in the work dtype, in their own memory."""
    block = widened(unpack_rows(packed, bits), dtype)
    return block if block.size(1) == features else block[:, :features].contiguous()


def _decode(codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of codes [r, n, size], written over the codes; scale and zero are [r, n, 1]."""
    # the product is exact, so the sum is the same whether or not it is fused
    if is_compiling():
        values = codes * scale + zero
    elif is_cpu(codes.device):
        # two ops take half the time of one: a CPU's loops are vectorised for one broadcast operand, not for two
        values = codes.mul_(scale).add_(zero)
    else:
        values = torch.addcmul(zero, codes, scale, out=codes)
    return within_range(values, scale, dtype)


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
    """dW [O, D] = dy^T x from dy [R, O] and what `int_group_pack` returned.

    `values` [R, k] in dy's dtype replace the features `channels` [k].
    """
    x = int_group_unpack(packed, scale, zero, features, dy.dtype, bits, group_size)
    if values is not None and channels is not None:
        x.index_copy_(1, channels.long(), values)
    return dy.t().mm(x)
