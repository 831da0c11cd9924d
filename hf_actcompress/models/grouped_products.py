"""Transformers' grouped products of experts, forward and backward, as its functions choose them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from transformers.integrations import moe

from ..ops.experts import GroupedProducts


def _as_stock(weight: Tensor, transposed: bool) -> Tensor:
    """[E, in, out]."""
    return weight if transposed else weight.transpose(-2, -1)


def _forward(h: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor:
    y: Tensor = moe._grouped_linear(h, weight, offsets, bias=bias, is_transposed=transposed)
    return y


def _of_input(dy: Tensor, weight: Tensor, offsets: Tensor, *, transposed: bool) -> Tensor:
    dx: Tensor = moe._grouped_mm(dy, _as_stock(weight, transposed).transpose(-2, -1), offsets)
    return dx


def _of_weight(h: Tensor, dy: Tensor, offsets: Tensor, weight: Tensor, *, transposed: bool) -> Tensor:
    if not moe._can_use_grouped_mm(h, _as_stock(weight, transposed), offsets):
        backward = torch.ops.transformers.grouped_mm_fallback_backward
        grad: Tensor = backward(h, _as_stock(weight, transposed), offsets, dy)[1]
        return grad if transposed else grad.transpose(-2, -1)
    rows, columns = (h, dy) if transposed else (dy, h)
    return torch.nn.functional.grouped_mm(rows.transpose(0, 1), columns, offs=offsets)


# True: weights are [E, in, out]; False: [E, out, in]
GROUPED_PRODUCTS = {
    transposed: GroupedProducts(*(partial(f, transposed=transposed) for f in (_forward, _of_input, _of_weight)))
    for transposed in (False, True)
}
