"""The last projection of a mixture of experts as one node of a layer's graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .experts import GroupedProducts, gradients
from .kernel_nodes import node

# the products that nodes name by their place here
_products: list[GroupedProducts] = []


def _run(
    h: Tensor, weight: Tensor, bias: Tensor | None, routing: Tensor, experts: Tensor, offsets: Tensor, products: int
) -> Tensor:
    rows = None if bias is None else bias[experts]
    return _products[products].forward(h, weight, offsets, rows) * routing.unsqueeze(-1)


def _run_backward(
    dy: Tensor,
    h: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    routing: Tensor,
    experts: Tensor | None,
    offsets: Tensor,
    needed: Sequence[bool],
    products: int,
    dtype: torch.dtype,
    h_dtype: torch.dtype,
) -> list[Tensor]:
    args = h, weight, bias, routing, experts, offsets, needed, _products[products], dtype, h_dtype
    return [x for x in gradients(dy, *args) if x is not None]


_GIVEN = "Tensor weight, Tensor? bias, Tensor routing"
DOWN = node(
    f"experts_down(Tensor h, {_GIVEN}, Tensor experts, Tensor offsets, int products) -> Tensor", _run, pointwise=False
)(_run)
DOWN_BWD = node(
    f"experts_down_bwd(Tensor dy, Tensor? h, {_GIVEN}, Tensor? experts, Tensor offsets, bool[] needed, int products,"
    " ScalarType dtype, ScalarType h_dtype) -> Tensor[]",
    _run_backward,
    pointwise=False,
)(_run_backward)


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        routing: Tensor,
        experts: Tensor,
        offsets: Tensor,
        products: int,
    ) -> Tensor:
        needed = ctx.needs_input_grad
        kept = h if needed[1] or needed[3] else None
        ctx.save_for_backward(kept, weight, bias, routing, None if bias is None else experts, offsets)
        ctx.rest = list(needed[:4]), products, weight.dtype, h.dtype
        return DOWN(h, weight, bias, routing, experts, offsets, products)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        found = iter(DOWN_BWD(dy, *ctx.saved_tensors, *ctx.rest))
        return *(next(found) if needed else None for needed in ctx.rest[0]), None, None, None


def experts_down(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    routing: Tensor,
    experts: Tensor,
    offsets: Tensor,
    products: GroupedProducts,
) -> Tensor:
    """``(h @ weight[e] + bias[e]) * routing`` [S, out] in a trace; the arguments are those of `ops.experts_down`.

    Its backward reads h, and not the product.
    """
    if products not in _products:
        _products.append(products)
    place = _products.index(products)
    return _Down.apply(h, weight, bias, routing, experts, offsets, place)  # type: ignore[no-untyped-call, no-any-return]
