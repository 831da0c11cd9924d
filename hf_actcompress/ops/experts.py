"""The last projection of a mixture of experts and its routing weights: neither its input nor its output is kept.

Row i of the S pairs of token and expert gives w[i] * (h[i] @ W[e] + b[e]). Stock keeps that product for the gradient of
w. It is not needed: with t = dy @ W[e]^T, which is the gradient of h without the factor w, the gradient of w is
t . h + dy . b[e]. In fp32, where this other order of the sums would be visible, the product is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..codecs import IDENTITY, Codec
from ..records import applied, known_record, load, parameter, record_of, save, stored_exact
from .first_order import once_differentiable


@dataclass(frozen=True)
class GroupedProducts:
    """Stock's matrix products, which depend on the device and on the versions of torch and transformers.

    Args:
        forward: (h, weight, offsets, bias) -> y [S, out], with the bias of each row [S, out] or None.
        of_input: (dy, weight, offsets) -> dy @ weight^T [S, in].
        of_weight: (h, dy, offsets, weight) -> the gradient of the weight, in its shape.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    of_input: Callable[[Tensor, Tensor, Tensor], Tensor]
    of_weight: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class ExpertsDownFunction(torch.autograd.Function):
    """Variant "input": keeps h (which is usually derived), the routing weights and the order of the rows."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,  # [S, in], sorted by expert
        weight: Tensor,  # [E, out, in] or [E, in, out]
        bias: Tensor | None,  # [E, out]
        routing: Tensor,  # [S]
        experts: Tensor,  # [S], which expert each row is for
        offsets: Tensor,  # [E], where the rows of each expert end
        products: GroupedProducts,
        codec: Codec,
    ) -> Tensor:
        needs_h = ctx.needs_input_grad[1] or ctx.needs_input_grad[3]
        save(
            ctx,
            record_of(h, codec) if needs_h else None,
            parameter(weight)
            if isinstance(weight, torch.nn.Parameter)
            else known_record(weight) or stored_exact(weight),
            None if bias is None else parameter(bias) if isinstance(bias, torch.nn.Parameter) else stored_exact(bias),
            stored_exact(routing),
            stored_exact(experts) if bias is not None else None,
            stored_exact(offsets),
        )
        ctx.products, ctx.h_dtype = products, h.dtype
        return weighted_product((h, weight, bias, routing, experts, offsets), products)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        found = gradients(dy, load(ctx, dy), ctx.needs_input_grad[:4], ctx.products, ctx.h_dtype)
        return *found, None, None, None, None


def weighted_product(given: Sequence[Any], products: GroupedProducts) -> Tensor:
    """The forward; `given` are the tensors of `experts_down`, from h to the offsets."""
    h, weight, bias, routing, experts, offsets = given
    y = products.forward(h, weight, offsets, None if bias is None else bias[experts])
    weighted: Tensor = y * routing.unsqueeze(-1)
    return weighted


def gradients(
    dy: Tensor, kept: Sequence[Any], needed: Sequence[bool], products: GroupedProducts, h_dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of h, weight, bias and routing, as far as they are `needed`.

    `kept` are these four, the experts and the offsets; h is None if no gradient is made of it, and the experts are if
    there is no bias.
    """
    h, weight, bias, routing, experts, offsets = kept
    # stock's products have the dtype of the weight
    dtype = weight.dtype
    needs_h, needs_weight, needs_bias, needs_routing = needed
    dh = dweight = dbias = drouting = None
    # the products need rows of one stride
    dy = dy.contiguous()
    by_inner_products = needs_routing and dtype != torch.float32
    if needs_weight or needs_bias or not by_inner_products:
        weighted = (dy * routing.unsqueeze(-1)).to(dtype)
    if needs_routing and not by_inner_products:
        y = products.forward(h, weight, offsets, None if bias is None else bias[experts])
        drouting = (dy * y).sum(-1).to(routing.dtype)
    elif needs_routing:
        t = products.of_input(dy.to(weight.dtype), weight, offsets)
        drouting = _inner(t, h)
        if bias is not None:
            drouting = drouting + _inner(dy, bias[experts])
        drouting = drouting.to(routing.dtype)
        dh = (t * routing.unsqueeze(-1)).to(h_dtype) if needs_h else None
    if needs_h and dh is None:
        dh = products.of_input(weighted.to(weight.dtype), weight, offsets).to(h_dtype)
    if needs_weight:
        dweight = products.of_weight(h.to(weight.dtype), weighted.to(weight.dtype), offsets, weight)
    if needs_bias:
        dbias = torch.zeros_like(bias).index_put_((experts,), weighted.to(bias.dtype), accumulate=True)
    return dh, dweight, dbias, drouting


def _inner(x: Tensor, y: Tensor) -> Tensor:
    """The inner products [S] of rows, in fp32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * y.to(wide)).sum(-1)


def experts_down(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    routing: Tensor,
    experts: Tensor,
    offsets: Tensor,
    products: GroupedProducts,
    *,
    codec: Codec = IDENTITY,
) -> Tensor:
    """``(h @ weight[e] + bias[e]) * routing`` of rows that are sorted by their expert e.

    Args:
        h: [S, in], the experts' activations.
        weight: [E, out, in], or [E, in, out]; `products` knows which.
        bias: [E, out] or None.
        routing: [S], the weight of each row, in any floating dtype.
        experts: [S], integers, ascending.
        offsets: [E], int32, where the rows of each expert end.
        products: Stock's grouped products.
        codec: How h is stored where it is not derived.

    Returns:
        [S, out], in the dtype of the product promoted with that of `routing`; bit-equal to stock.

    Saves:
        `routing`, `experts` and `offsets`; the weight by reference, or the tensors from which an adapter makes it; h by
        its record (stock: h, and the product [S, out] for the gradient of `routing`).

    Gradient:
        Exact. In fp32 bit-equal to stock, at the cost of one more product. In 16 bits the gradients of `weight` and
        `bias` are bit-equal; those of h and `routing` use the same factors in another order, with an error like
        stock's. First order only.
    """
    return applied(ExpertsDownFunction, h, weight, bias, routing, experts, offsets, products, codec)
