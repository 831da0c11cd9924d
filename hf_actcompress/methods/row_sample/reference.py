"""A fixed number of rows that represents all rows in a sum over rows, without bias."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.groups import work_dtype
from ...reference.rng import uniform

# the sum of all rows' probabilities as integers
_MASS = 1 << 48


def row_sample_pack(
    x: Tensor, k: int, winner_take_all: bool, stratified: bool, factor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose k rows of x [R, D], k <= R, with probabilities p proportional to their norms times `factor` [R] >= 0.

    The c rows of largest norm are always kept; c minimises (1 - P_c) / (k - c), where P_c is the sum of their
    probabilities (without `winner_take_all`, c is 0). The other k - c rows are drawn with replacement by the codecs'
    generator. c is a tensor: no shape depends on it.

    Returns:
        rows [k, D], each times its weight: 1 if certain, (1 - P_c) / ((k - c) p) if drawn. index int32 [k].
    """
    if k == x.size(0):
        return x.clone(), torch.arange(k, dtype=torch.int32, device=x.device)
    mass, total = _masses(x, factor)
    largest = mass.topk(k)  # descending
    slot = torch.arange(k, device=x.device)
    certain = _certain(largest.values, mass.sum()) if winner_take_all else slot[0]
    is_certain = slot < certain
    rest = mass.scatter(0, largest.indices, torch.where(is_certain, 0, largest.values))
    drawn = _draw(rest.cumsum(0), slot - certain, k - certain, total.dtype, stratified)
    index = torch.where(is_certain, largest.indices, drawn)
    # if all other rows are zero, there is nothing to draw, and the slot stays empty
    weight = torch.where(rest[drawn] > 0, rest.sum() / ((k - certain) * rest[drawn]).clamp_min(1), 0)
    # a NaN or inf of x makes the sum of norms NaN or inf, and with it every kept row
    weight = torch.where(is_certain, 1, weight) + total * 0
    rows = x.index_select(0, index).to(work_dtype(x.dtype))
    return rows.mul_(weight.unsqueeze(1)).to(x.dtype), index.to(torch.int32)


def _masses(x: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """The probability of each row as an integer, int64 [R], and the sum of the norms.

    They are integers because sums of integers are exact and the same in any order. A prefix sum of floats on a GPU is
    not, and a checkpoint's second pass must draw the same rows. Rows below 2^-49 of the sum count as zero.
    """
    norms = torch.linalg.vector_norm(x, dim=1, dtype=work_dtype(x.dtype))
    # in the widest dtype of the device
    norms = norms if x.device.type == "mps" else norms.double()
    if factor is not None:
        norms = norms * factor.to(norms.dtype)
    total = norms.sum()
    p = torch.where(total > 0, norms / total, 1 / x.size(0))
    return (p * _MASS).nan_to_num(0, 0, 0).round().to(torch.int64), total


def _certain(largest: Tensor, total: Tensor) -> Tensor:
    """How many of the largest masses [k], descending, are always kept: at most k - 1."""
    k = largest.size(0)
    # the mass that is left after c = 0 ... k - 1 rows
    left = total - torch.nn.functional.pad(largest.cumsum(0)[:-1], (1, 0))
    return (left / torch.arange(k, 0, -1, device=largest.device)).argmin()


def _draw(edges: Tensor, slot: Tensor, draws: Tensor, dtype: torch.dtype, stratified: bool) -> Tensor:
    """Rows int64 [k], found by the prefix sums `edges` [R] of their masses; negative slots mark unused entries."""
    point = uniform((slot.size(0),), dtype, edges.device)
    if stratified:
        # one draw in each of `draws` equal parts
        point = (point + slot) / draws
    point = (point * edges[-1]).to(torch.int64).clamp(min=0).minimum(edges[-1] - 1)
    return torch.searchsorted(edges, point, right=True).clamp_max(edges.size(0) - 1)


def row_sample_unpack(rows: Tensor, index: Tensor, count: int) -> Tensor:
    """x [R, D] in expectation: kept rows in their places (those drawn twice are added), zeros elsewhere."""
    out = rows.new_zeros(count, rows.size(1))
    # index_put sums in a fixed order on every device; index_add does not
    return out.index_put_((index,), rows, accumulate=True)


def row_sample_grad_weight(dy: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """dW [O, D] without bias: the product over the k kept rows alone. dy [R, O]."""
    return dy.index_select(0, index).t().mm(rows)
