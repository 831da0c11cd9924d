"""The output of an expert is not kept for the gradient of its routing weight.

Row i of the pairs of token and expert gives r[i] * y[i], with y[i] = h[i] @ W[e] + b[e]. Autograd keeps y, because the
gradient of r is dz . y. It is not needed: with t = dz @ W[e]^T, r * t is the gradient of h, and that of r is
t . h + dz . b[e]. In fp32, where this other order of the sums would be visible, the product is recomputed, and
gradients have stock's bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from ..compilation.policy import hint, of_forward, tag_recompute
from .fused import move_behind

aten = torch.ops.aten
GROUPED = aten._grouped_mm.default
_MASKED = aten.masked_fill.Scalar
_CASTS = {aten._to_copy.default, aten.clone.default, aten.alias.default}


class _Routed(NamedTuple):
    """A product of experts whose rows have factors.

    Attributes:
        product: The grouped product.
        bias: The bias of each row; None without one.
        mask: Which rows [S, 1] are no expert's, and are zeros; None without it.
        factors: The routing weights [S, 1].
        dz: The gradient of the product with its factors.
        sums: Makes the gradient of the factors.
    """

    product: Node
    bias: Node | None
    mask: Node | None
    factors: Node
    dz: Node
    sums: Node


def keep_no_routed_products(graph: Graph, outputs: int) -> None:
    """Let no gradient of routing weights read a product of experts. The joint graph is changed in place."""
    forward = of_forward(graph, outputs)
    for sums in [node for node in graph.nodes if node not in forward and node.target is aten.sum.dim_IntList]:
        routed = _routed(sums, forward)
        if routed is None:
            continue
        dh = None if routed.product.meta["val"].dtype == torch.float32 else _gradient_of_rows(routed)
        if dh is None:
            tag_recompute(routed.product)
        else:
            _by_inner_products(graph, routed, dh)


def _routed(sums: Node, forward: set[Node]) -> _Routed | None:
    """What a node sums over features, if that is a gradient times a product of experts."""
    scaled: Any = sums.args[0]
    if scaled.target is not aten.mul.Tensor or len(scaled.users) > 1 or list(sums.args[1:]) != [[1], True]:
        return None
    for dz, y in (scaled.args, scaled.args[::-1]):
        if not (isinstance(dz, Node) and isinstance(y, Node)) or dz in forward or y not in forward:
            continue
        readers = [user for user in y.users if user in forward]
        own, mask = (y.args[0], y.args[1]) if y.target is _MASKED and y.args[2] == 0 else (y, None)
        product, bias = (own.args[0], own.args[1]) if own.target is aten.add.Tensor else (own, None)  # type: ignore[union-attr]
        if product.target is not GROUPED or (bias is not None and not isinstance(bias, Node)):  # type: ignore[union-attr]
            continue
        if len(readers) != 1 or readers[0].target is not aten.mul.Tensor:
            continue
        factors = next((x for x in readers[0].all_input_nodes if x is not y), None)
        if factors is not None and factors.meta["val"].dim() == 2 and hint(factors.meta["val"].size(1)) == 1:
            return _Routed(product, bias, mask, factors, dz, sums)  # type: ignore[arg-type]
    return None


def _gradient_of_rows(routed: _Routed) -> Node | None:
    """The node that makes the gradient of the product's rows h; None if they have none."""
    weighted = [x for x in routed.dz.users if x.target is aten.mul.Tensor and routed.factors in x.args]
    while weighted:
        x = weighted.pop()
        for user in x.users:
            if user.target in _CASTS or (user.target is _MASKED and user.args[1] is routed.mask):
                weighted.append(user)
            # that of the experts' weights reads the rows in columns, and other experts may have the same factors
            elif user.target is GROUPED and user.args[0] is x and _is_transposed(user, routed.product):
                return user
    return None


def _is_transposed(dh: Node, product: Node) -> bool:
    """Whether a grouped product reads the other's weights and rows of experts."""
    return dh.args[2] is product.args[2] and _untransposed(dh.args[1]) is _untransposed(product.args[1])


def _untransposed(weight: Any) -> Any:
    while weight.target is aten.transpose.int:
        weight = weight.args[0]
    return weight


def _by_inner_products(graph: Graph, routed: _Routed, dh: Node) -> None:
    product, bias, mask, factors, dz, sums = routed
    rows: Any = product.args[0]
    weighted: Any = dh.args[0]
    dtype, wide = weighted.meta["val"].dtype, torch.float32

    def call(target: Any, *args: Any, **kwargs: Any) -> Node:
        node = graph.call_function(target, args, kwargs)
        with torch.no_grad():
            node.meta["val"] = target(*_values(args), **kwargs)
        return node

    def inner(x: Node, y: Node) -> Node:
        x, y = (z if z.meta["val"].dtype == wide else call(aten._to_copy.default, z, dtype=wide) for z in (x, y))
        return call(aten.sum.dim_IntList, call(aten.mul.Tensor, x, y), [-1], True)

    with graph.inserting_before(dh):
        dz = dz if mask is None else call(_MASKED, dz, mask, 0)
        given = dz if dz.meta["val"].dtype == dtype else call(aten._to_copy.default, dz, dtype=dtype)
        if not given.meta["val"].is_contiguous():
            # the products need rows of one stride
            given = call(aten.clone.default, given, memory_format=torch.contiguous_format)
        t = call(GROUPED, given, *dh.args[1:])
        new = call(aten.mul.Tensor, t, factors)
        if new.meta["val"].dtype != dh.meta["val"].dtype:
            new = call(aten._to_copy.default, new, dtype=dh.meta["val"].dtype)
        total = inner(t, rows)
        if bias is not None:
            total = call(aten.add.Tensor, total, inner(dz, bias))
        if mask is not None:
            # a product writes nothing into rows behind the last expert's
            total = call(_MASKED, total, mask, 0)
        if total.meta["val"].dtype != sums.meta["val"].dtype:
            total = call(aten._to_copy.default, total, dtype=sums.meta["val"].dtype)
    dh.replace_all_uses_with(new)
    graph.erase_node(dh)
    move_behind(graph, sums, total)
    sums.replace_all_uses_with(total)
    graph.erase_node(sums)


def _values(args: Any) -> Any:
    return [x.meta["val"] if isinstance(x, Node) else x for x in args]
