"""A fixed number of rows that stand for all in a sum over rows, without bias."""

from __future__ import annotations

import torch
from torch import Tensor

from .groups import work_dtype


def row_sample_pack(x: Tensor, k: int, winner_take_all: bool, stratified: bool) -> tuple[Tensor, Tensor]:
    """Choose k rows of x [R, D], k <= R, with probabilities p proportional to their norms.

    The c rows of largest norm are kept for certain, c the minimiser of (1 - P_c) / (k - c) with P_c their probability
    (none without `winner_take_all`), and k - c are drawn with replacement among the others by x's device's default
    generator. c is a tensor: no shape follows from it.

    Returns:
        rows [k, D], each times its weight: 1 if certain, (1 - P_c) / ((k - c) p) if drawn. index int32 [k].
    """
    if k == x.size(0):
        return x.clone(), torch.arange(k, dtype=torch.int32, device=x.device)
    p, total = _probabilities(x)
    order = p.topk(k)  # p of the k largest, descending, and where they are
    slot = torch.arange(k, device=x.device)
    certain = _certain(order.values) if winner_take_all else torch.zeros((), dtype=torch.int64, device=x.device)
    # a NaN does not compare: the certain rows stay out of the draw, the others in
    rest = p.scatter(0, order.indices, torch.where(slot < certain, 0, order.values))
    edges = rest.cumsum(0)
    draws, mass = k - certain, edges[-1]
    point = torch.rand(k, dtype=p.dtype, device=x.device)
    if stratified:
        # one draw in each of k - c equal parts of the rest
        point = (point + (slot - certain)) / draws
    drawn = torch.searchsorted(edges, (point * mass).clamp(max=mass), right=True).clamp_max(x.size(0) - 1)
    # the point may be the last edge by rounding, and rows behind it have no mass
    drawn = torch.where(rest[drawn] > 0, drawn, rest.argmax())
    index = torch.where(slot < certain, order.indices, drawn)
    # no mass is left where all other rows are zero: nothing to draw
    weight = torch.where(mass > 0, mass / (draws * rest[drawn]), 0)
    weight = torch.where(slot < certain, 1, weight)
    # a NaN or inf of x makes the sum of norms one, and so every row that is kept
    weight = weight + total * 0
    rows = x.index_select(0, index).to(work_dtype(x.dtype))
    return rows.mul_(weight.unsqueeze(1)).to(x.dtype), index.to(torch.int32)


def _probabilities(x: Tensor) -> tuple[Tensor, Tensor]:
    """p [R] proportional to the norms of the rows, uniform if all are zero; the sum of the norms."""
    norms = torch.linalg.vector_norm(x, dim=1, dtype=work_dtype(x.dtype))
    # sums over many rows: wide, where the device has it
    norms = norms if x.device.type == "mps" else norms.double()
    total = norms.sum()
    return torch.where(total > 0, norms / total, 1 / x.size(0)), total


def _certain(p: Tensor) -> Tensor:
    """How many of the largest p [k], descending, are kept for certain: at most k - 1."""
    k = p.size(0)
    # P_c for c = 0 ... k - 1
    covered = torch.nn.functional.pad(p.cumsum(0)[:-1], (1, 0))
    return ((1 - covered) / torch.arange(k, 0, -1, device=p.device)).argmin()


def row_sample_unpack(rows: Tensor, index: Tensor, count: int) -> Tensor:
    """x [R, D] in expectation: the kept rows at their places, those drawn twice added up, zeros elsewhere."""
    out = rows.new_zeros(count, rows.size(1))
    # index_put sums in a fixed order on every device, index_add does not
    return out.index_put_((index,), rows, accumulate=True)


def row_sample_grad_weight(dy: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """dW [O, D], unbiased: the product over the k kept rows alone. dy [R, O]."""
    return dy.index_select(0, index).t().mm(rows)
