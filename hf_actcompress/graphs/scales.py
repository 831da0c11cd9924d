"""Factors and casts that move large tensors for nothing, as an adapter's: the same bits by fewer bytes.

PEFT multiplies the second product of an adapter, which is as large as the layer's output, by a factor that is mostly a
power of two. To multiply by a power of two rounds nothing. So the smaller side of the product may be multiplied in its
place, which is the result of the adapter's first product. In backward, the products that are made of the gradient are
multiplied, and not the gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten
_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten.t.default})
_CAST = aten._to_copy.default
# in 16 bits a factor may leave the range of numbers
_WIDE_RANGE = (torch.bfloat16, torch.float32, torch.float64)


def move_scales(graph: Graph) -> None:
    """Move factors to where they cost least, and drop casts that are undone. The graph is changed in place."""
    for node in list(graph.nodes):
        if node.target is _CAST:
            _undone(graph, node)
        elif node.target is aten.mul.Tensor and _is_exact(node):
            _before_product(graph, node) or _behind_products(graph, node)
    graph.eliminate_dead_code()


def _undone(graph: Graph, cast: Node) -> None:
    """A cast of a cast to a wider dtype, back to the first one."""
    wide: Any = cast.args[0]
    if wide.target is not _CAST:
        return
    x = wide.args[0]
    before, between, after = (node.meta["val"] for node in (x, wide, cast))
    # autograd names device and layout, which stay what they are
    same = before.device == between.device == after.device and before.dtype == after.dtype and before.is_contiguous()
    if same and before.is_floating_point() and torch.promote_types(before.dtype, between.dtype) == between.dtype:
        cast.replace_all_uses_with(x)


def _is_exact(node: Node) -> bool:
    """Whether a node multiplies a tensor by a power of two, which rounds nothing."""
    x, factor = node.args
    if not isinstance(x, Node) or not isinstance(factor, (int, float)) or node.kwargs:
        return False
    value = node.meta["val"]
    return abs(math.frexp(factor)[0]) == 0.5 and value.dtype in _WIDE_RANGE and x.meta["val"].dtype == value.dtype


def _before_product(graph: Graph, node: Node) -> bool:
    """``mm(x, w) * factor`` as ``mm(x * factor, w)``, where x is smaller than the product."""
    product: Any = node.args[0]
    while product.target in _VIEWS and len(product.users) == 1:
        product = product.args[0]
    if product.target is not aten.mm.default or len(product.users) > 1:
        return False
    x, w = product.args
    if not _columns(x) < _columns(product):
        return False
    with graph.inserting_before(product):
        scaled = graph.call_function(aten.mul.Tensor, (x, node.args[1]))
    scaled.meta = dict(x.meta)
    product.args = (scaled, w)
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    return True


def _behind_products(graph: Graph, node: Node) -> bool:
    """``mm(g * factor, w)`` and ``mm((g * factor).t(), z)`` as products of g, which the factor multiplies."""
    products = _products(node)
    if not products or not all(_columns(product) < _columns(node) for product in products):
        return False
    for product in products:
        with graph.inserting_after(product):
            scaled = graph.call_function(aten.mul.Tensor, (product, node.args[1]))
        scaled.meta = dict(product.meta)
        product.replace_all_uses_with(scaled, delete_user_cb=lambda user, scaled=scaled: user is not scaled)  # type: ignore[misc]
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    return True


def _products(x: Node) -> list[Node]:
    """The products that read x or views of it; none if something else reads them, too, or a product reads x twice."""
    found: list[Node] = []
    for user in x.users:
        if user.target in _VIEWS:
            inner = _products(user)
            if not inner:
                return []
            found += inner
        elif user.target is aten.mm.default and user.args.count(x) == 1:
            found.append(user)
        else:
            return []
    return found if len(set(found)) == len(found) else []


def _columns(x: Node) -> int:
    """The last size of a tensor: of products with weights it is no symbol. A large number stands for a symbol."""
    size = x.meta["val"].shape[-1]
    return size if isinstance(size, int) else 2**62
