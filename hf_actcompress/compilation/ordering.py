"""Orders a backward graph: a weight's gradient, and the input that is recomputed for it, come first.

A compiler fuses kernels that read the same tensors. The input of a linear layer is often recomputed from tensors
that the gradient of a norm or an activation reads, too. In one kernel with that gradient, the input would be alive
beside gradients that are not needed yet. And the product for the weight's gradient, which runs as soon as its input
exists, would split that kernel in two.

With few tokens a weight's gradient is larger than its factors. Its place is then left to the compiler, which may put it
last: early, it would only add to the peak.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..private_apis import FakeTensorMode
from .policy import is_pointwise, is_view, made_by, nbytes

aten = torch.ops.aten


def order_weights(graph: Graph) -> None:
    """Put a weight's gradient before the nodes that read the input's gradient.

    It is done where the input is recomputed, and where the weight's gradient is no larger than its two factors. If
    several layers read the input, it is done for one of them: this keeps the input out of the later kernel.
    """
    ordered: set[Node] = set()
    for product in list(graph.nodes):
        for x, dy in _factors(product):
            if x in ordered or made_by(x).op == "placeholder" or not is_pointwise(made_by(x)):
                continue
            for dx in list(dy.users):
                users = (*dx.users, *_pointwise_readers(dx))
                if _is_smaller(product, x, dy) and _is_of_input(dx, dy) and all(user > product for user in users):
                    _put_behind(graph, dx, product)
                    ordered.add(x)


def _factors(product: Node) -> list[tuple[Node, Node]]:
    """(input, gradient of the output) of a linear layer, in both orders, if `product` may be its weight's gradient."""
    if product.target is not aten.mm.default:
        return []
    left, right = product.args
    if left.target is not aten.permute.default or left.args[1] != [1, 0]:  # type: ignore[union-attr]
        return []
    (left,) = left.all_input_nodes  # type: ignore[union-attr]
    return [(left, right), (right, left)]  # type: ignore[list-item]


def _is_smaller(product: Node, x: Node, dy: Node) -> bool:
    """Whether a weight's gradient takes less memory than its factors, which die with it. It does with many tokens."""
    return nbytes(product) <= nbytes(x) + nbytes(dy)


def _is_of_input(product: Node, dy: Node) -> bool:
    pointwise = _pointwise_readers(product) if product.target is aten.mm.default and product.args[0] is dy else []
    return bool(pointwise) and all(map(is_pointwise, pointwise))


def _pointwise_readers(x: Node) -> list[Node]:
    """The nodes that read x or a view of it."""
    readers: list[Node] = []
    for user in x.users:
        readers += _pointwise_readers(user) if is_view(user) else [user]
    return readers


def _put_behind(graph: Graph, x: Node, before: Node) -> None:
    users = list(x.users)
    with graph.inserting_before(min(users)):
        later = after(graph, x, before)
    for user in users:
        user.replace_input_with(x, later)


def after(graph: Graph, x: Node, before: Node) -> Node:
    """x with the same bits, for readers that must not run before the tensor `before` exists.

    The new node reads one number of `before` and returns x whether or not the number is NaN. A kernel that it is fused
    into takes no longer than without it.
    """
    mode, one = x.meta["val"].fake_mode, [1] * before.meta["val"].dim()
    before = call(graph, mode, aten.as_strided.default, before, one, one)
    return call(graph, mode, aten.where.self, call(graph, mode, aten.eq.Tensor, before, before), x, x)


def call(graph: Graph, mode: FakeTensorMode, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Insert a call at the graph's current insertion point, with the fake value that compilers read."""
    node = graph.call_function(target, args, kwargs)
    given, options = map_arg((args, kwargs), lambda x: x.meta["val"])
    with mode, torch.no_grad():
        node.meta["val"] = target(*given, **options)
    return node
