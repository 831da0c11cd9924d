"""8-bit floats with a scale per group of features."""

from __future__ import annotations

import torch
from torch import Tensor

from .groups import (
    group_count,
    group_scale,
    in_groups,
    operands,
    row_chunks,
    row_slices,
    rows_features,
    spans,
    widened,
    within_range,
    work_dtype,
)


def float8_pack(x: Tensor, dtype: torch.dtype, group_size: int) -> tuple[Tensor, Tensor]:
    """x [..., D], R rows, as float8 codes [R, D] of `dtype` and scales bf16 [R, n], so that x = codes * scale.

    A group's largest magnitude becomes the largest finite float8 or one just below it (the scale is rounded up), so
    that nothing saturates. Codes are products with the scale's reciprocal, which has a rounding error: an x halfway
    between two codes may get either. A NaN or inf makes the scale, and so the group, NaN or inf.
    """
    rows, features = rows_features(x)
    codes = x.new_empty(rows, features, dtype=dtype)
    scale = x.new_empty(rows, group_count(features, group_size), dtype=torch.bfloat16)
    for part, chunk in row_chunks(x):
        for start, stop, size in spans(features, group_size):
            values = in_groups(chunk[:, start:stop].to(work_dtype(x.dtype), copy=True), size)
            largest = values.abs().amax(-1, keepdim=True)
            step = group_scale(largest, operands(torch.finfo(dtype).max, largest))
            values.mul_(widened(step, x.dtype).reciprocal_().unsqueeze(-1))
            codes[part, start:stop] = values.flatten(1).to(dtype)
            scale[part, start // group_size : group_count(stop, group_size)] = step
    return codes, scale


def float8_unpack(codes: Tensor, scale: Tensor, dtype: torch.dtype, group_size: int) -> Tensor:
    """The rows [R, D] in `dtype`, decoded from what `float8_pack` returned."""
    rows, features = codes.shape
    out = codes.new_empty(rows, features, dtype=dtype)
    for part in row_slices(rows, features, codes.device) if features else ():
        for start, stop, size in spans(features, group_size):
            step = scale[part, start // group_size : group_count(stop, group_size)].unsqueeze(-1)
            values = in_groups(codes[part, start:stop].to(work_dtype(dtype)), size).mul_(step)
            out[part, start:stop] = within_range(values, step, dtype).flatten(1)
    return out


def float8_grad_weight(dy: Tensor, codes: Tensor, scale: Tensor, group_size: int) -> Tensor:
    """dW [O, D] = dy^T x from dy [R, O] and what `float8_pack` returned."""
    return dy.t().mm(float8_unpack(codes, scale, dy.dtype, group_size))
