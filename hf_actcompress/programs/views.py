"""Reshapes of values, as direct calls of tensor methods: a Python function of our own would cost more than the view."""

from __future__ import annotations

import torch
from torch.fx import Node

from .emit import Emitter


def size_of(e: Emitter, x: Node, dim: int) -> Node:
    """The size of a dimension of x [B, T, ...]. Rows [B * T, C] have neither B nor T: read them off `e.tokens`."""
    if e.meta(x).dim() == 2:
        assert e.tokens is not None
        x = e.tokens
    return e.once(torch.Tensor.size, x, dim)


def reshaped(e: Emitter, x: Node, sizes: tuple[int, ...]) -> Node:
    """x in another shape: a size below -1 is that of a dimension of x (-2: the first, -3: the second, ...)."""
    if len(sizes) == 2:
        y = e.once(torch.Tensor.reshape, x, *sizes)
    elif len(sizes) == 3 and e.meta(x).dim() == 4 and sizes[:2] == (-2, -3):
        y = e.call(torch.Tensor.flatten, x, 2)
    else:
        y = e.call(torch.Tensor.reshape, x, *(size_of(e, x, -2 - size) if size < -1 else size for size in sizes))
    e.sources[y] = x
    return y


def rows_of(e: Emitter, x: Node) -> Node:
    """x [..., C] as [rows, C]: the rows of which x is a view, or else a reshape of the node that x is a reshape of."""
    if e.meta(x).dim() == 2:
        return x
    if x in e.rows:
        return e.rows[x]
    return e.once(torch.Tensor.reshape, e.sources.get(x, x), -1, e.meta(x).size(-1))


def tokens_of(e: Emitter, rows: Node, like: Node) -> Node:
    """Rows [rows, C] in the shape of `like`: [..., C]."""
    if e.meta(like).dim() == 2:
        return rows
    shape, width = e.meta(like).shape, e.meta(rows).size(1)
    if shape[-1] == width:
        y = e.call(torch.Tensor.view_as, rows, like)
    else:
        y = e.call(torch.Tensor.view, rows, *(size_of(e, like, dim) for dim in range(len(shape) - 1)), width)
    e.rows[y] = rows
    return y
