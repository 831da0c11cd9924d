"""The last projection of a mixture of experts as one node of a layer's graph. Its backward reads h, and no product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .experts import GroupedProducts, gradients, weighted_product
from .nodes import node

# the products that nodes name by their place here
_products: list[GroupedProducts] = []


def _run(*given: Any) -> Tensor:
    *tensors, products = given
    return weighted_product(tensors, _products[products])


def _run_backward(dy: Tensor, *given: Any) -> list[Tensor]:
    *kept, needed, products, h_dtype = given
    found = gradients(dy, kept, needed, _products[products], h_dtype)
    return [x for x in found if x is not None]


_WEIGHTS = "Tensor weight, Tensor? bias, Tensor routing"
DOWN = node(
    f"experts_down(Tensor h, {_WEIGHTS}, Tensor experts, Tensor offsets, int products) -> Tensor", _run, pointwise=False
)(_run)
DOWN_BWD = node(
    f"experts_down_bwd(Tensor dy, Tensor? h, {_WEIGHTS}, Tensor? experts, Tensor offsets, bool[] needed, int products,"
    " ScalarType h_dtype) -> Tensor[]",
    _run_backward,
    pointwise=False,
)(_run_backward)


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, products: int, *given: Any) -> Tensor:
        h, weight, bias, routing, experts, offsets = given
        needed = ctx.needs_input_grad[1:5]
        kept = h if needed[1] or needed[3] else None
        ctx.save_for_backward(kept, weight, bias, routing, None if bias is None else experts, offsets)
        ctx.rest = list(needed), products, h.dtype
        return DOWN(*given, products)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        found = iter(DOWN_BWD(dy, *ctx.saved_tensors, *ctx.rest))
        return None, *(next(found) if needed else None for needed in ctx.rest[0]), None, None


def experts_down(*given: Any, products: GroupedProducts) -> Tensor:
    """What `ops.experts_down` returns, in a trace. `given` are its tensors, from h to the offsets."""
    if products not in _products:
        _products.append(products)
    return _Down.apply(_products.index(products), *given)  # type: ignore[no-untyped-call, no-any-return]
