"""Rows of a sequence taken out of it, and put back among rows that get no gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops.first_order import once_differentiable


class ChosenRowsFunction(torch.autograd.Function):
    """Keeps the numbers of the rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.set_materialize_grads(False)
        ctx.tokens = x.size(1)
        return x.gather(1, _index(rows, x, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        dx = dy.new_zeros(dy.size(0), ctx.tokens, *dy.shape[2:])
        return dx.scatter_(1, _index(rows, dy, 1), dy), None


class MergedRowsFunction(torch.autograd.Function):
    """Keeps the numbers of the rows."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, others: Tensor, rows: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.set_materialize_grads(False)
        ctx.dim = dim
        return others.scatter(dim, _index(rows, y, dim), y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (rows,) = ctx.saved_tensors
        return dy.gather(ctx.dim, _index(rows, dy, ctx.dim)), None, None, None


def _index(rows: Tensor, x: Tensor, dim: int) -> Tensor:
    """rows [B, K] for `gather` along `dim` of x [B, ...]."""
    shape = [rows.size(0), *([1] * (x.dim() - 1))]
    shape[dim] = rows.size(1)
    size = list(x.shape)
    size[0], size[dim] = shape[0], shape[dim]
    return rows.view(shape).expand(size)


def chosen_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Some rows of each sequence.

    Args:
        x: ``[B, S, *]``.
        rows: int64 ``[B, K]``, numbers of rows, each at most once.

    Returns:
        ``[B, K, *]``.

    Saves:
        `rows` by reference.

    Gradient:
        Exact: zero for the rows that were not taken.
    """
    out: Tensor = ChosenRowsFunction.apply(x, rows)  # type: ignore[no-untyped-call]
    return out


def merged_rows(y: Tensor, others: Tensor, rows: Tensor, dim: int = 1) -> Tensor:
    """Rows put back where they were, among others that are constants.

    Args:
        y: ``[B, K, *]``; with ``dim=2`` heads ``[B, H, K, D]``.
        others: The same with S in place of K. Its rows with the numbers in `rows` are not read.
        rows: int64 ``[B, K]``.
        dim: The dimension of y that has K.

    Returns:
        A new tensor of the shape of `others`.

    Saves:
        `rows` by reference.

    Gradient:
        Exact for y; none for `others`.
    """
    out: Tensor = MergedRowsFunction.apply(y, others, rows, dim)  # type: ignore[no-untyped-call]
    return out
