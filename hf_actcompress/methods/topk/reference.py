"""The largest entries of each row: their values, and their places as a bit mask or as indices in the row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...reference.bits import pack_mask, unpack_codes
from ...reference.groups import chunk_rows, row_chunks, row_slices, rows_features, work_dtype
from ...reference.not_finite import nothing, spoiled


def index_dtype(features: int) -> torch.dtype:
    """The narrowest integer dtype for so many positions (int16 wraps around: read it as unsigned)."""
    if features <= 1 << 8:
        return torch.uint8
    return torch.int16 if features <= 1 << 16 else torch.int32


def topk_pack(x: Tensor, k: int, masked: bool, sigmas: float | None = None) -> tuple[Tensor, Tensor]:
    """Keep exactly k entries of every row of x [..., D], R rows.

    Args:
        x: bf16, fp16, fp32 or fp64.
        k: Entries per row, at most D.
        masked: Whether positions are kept as one bit per element, or as an index per entry.
        sigmas: None: keep the k largest magnitudes. Otherwise: keep the first k entries that differ from the tensor's
            mean by more than so many standard deviations, which takes no sort; if there are fewer, the first others
            follow.

    Returns:
        values [R, k] in order of position, all NaN if x has a NaN or inf; mask uint8 [R, ceil(D / 8)] or index [R, k]
        of `index_dtype(D)`.
    """
    rows, features = rows_features(x)
    values = x.new_empty(rows, k)
    where = x.new_empty(
        rows, -(-features // 8) if masked else k, dtype=torch.uint8 if masked else index_dtype(features)
    )
    moments = _mean_and_bound(x, sigmas) if sigmas is not None and x.numel() else None
    for part, chunk in row_chunks(x):
        if moments is None:
            index = chunk.abs().topk(k, dim=1, sorted=False).indices.sort(dim=1).values
            values[part] = chunk.gather(1, index)
        else:
            mean, bound = moments
            index = _first_outside(chunk, mean, bound, k)
            # a NaN or inf anywhere makes the bound NaN or inf
            values[part] = chunk.gather(1, index) + (bound * 0).to(x.dtype)
        if masked:
            # a row ends with a whole byte
            mask = torch.zeros(chunk.size(0), where.size(1) * 8, dtype=torch.bool, device=x.device)
            where[part] = pack_mask(mask.scatter_(1, index, True)).view(chunk.size(0), -1)
        else:
            where[part] = index.to(where.dtype)
    # NaN and inf count as the largest, so a row that has one keeps one
    return spoiled(values), where


def _mean_and_bound(x: Tensor, sigmas: float) -> tuple[Tensor, Tensor]:
    """Mean of x, and `sigmas` standard deviations, both scalars in the work dtype."""
    dtype = work_dtype(x.dtype)
    mean = x.mean(dtype=dtype)
    square = torch.linalg.vector_norm(x, dtype=dtype).square() / x.numel()
    return mean, sigmas * (square - mean.square()).clamp_min(0).sqrt()


def _first_outside(chunk: Tensor, mean: Tensor, bound: Tensor, k: int) -> Tensor:
    """Positions int64 [r, k], ascending: per row the first k entries outside mean +- bound, then the first others."""
    outside = (chunk.to(bound.dtype) - mean).abs() > bound
    count = outside.cumsum(1, dtype=torch.int32)
    others = torch.arange(1, chunk.size(1) + 1, dtype=torch.int32, device=chunk.device) - count
    keep = torch.where(outside, count <= k, others <= k - count[:, -1:])
    # all entries that are not kept go to one extra place, which is cut off
    place = torch.where(keep, keep.cumsum(1) - 1, k)
    position = torch.arange(chunk.size(1), device=chunk.device).expand_as(place)
    return position.new_empty(chunk.size(0), k + 1).scatter_(1, place, position)[:, :k]


def topk_unpack(values: Tensor, where: Tensor, features: int, masked: bool) -> Tensor:
    """The rows [R, D], zero where nothing was kept; all NaN if x had a NaN or inf."""
    out = values.new_empty(values.size(0), features)
    for part in row_slices(values.size(0), features, values.device) if features else ():
        out[part] = _dense_rows(values[part], where[part], features, masked)
    return out


def topk_grad_weight(dy: Tensor, values: Tensor, where: Tensor, features: int, masked: bool) -> Tensor:
    """dW [O, D] = dy^T x from dy [R, O] and the kept entries of x; a few rows of x are made dense at a time."""
    return chunked_grad_weight(_dense_rows, dy, values, where, features, masked)


def chunked_grad_weight(
    dense_rows: Callable[..., Tensor], dy: Tensor, values: Tensor, where: Tensor, features: int, masked: bool
) -> Tensor:
    """`topk_grad_weight` with the function that makes rows dense as an argument: `_dense_rows` or a kernel."""
    if values.size(0) <= chunk_rows(features, values.device):
        return dy.t().mm(dense_rows(values, where, features, masked))
    # the sum over chunks is in the work dtype, because rounding each partial sum to bf16 would add up
    out = dy.new_zeros(dy.size(1), features, dtype=work_dtype(dy.dtype))
    for part in row_slices(values.size(0), features, values.device):
        out += dy[part].t().mm(dense_rows(values[part], where[part], features, masked))
    return out.to(dy.dtype)


def _dense_rows(values: Tensor, where: Tensor, features: int, masked: bool) -> Tensor:
    out = nothing(values, values.size(0), features)
    if masked:
        bits = unpack_codes(where.reshape(-1), 1, where.numel() * 8).view(torch.bool)
        return out.masked_scatter_(bits.view(values.size(0), where.size(1) * 8)[:, :features], values)
    index = where.long()
    return out.scatter_(1, index & 0xFFFF if where.dtype == torch.int16 else index, values)
