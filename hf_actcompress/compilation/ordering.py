"""The order of a backward graph: what is computed again for the gradient of a weight goes before what follows.

A compiler fuses kernels that read the same tensors. The input of a linear layer is computed again of what the gradient
of a norm or an activation reads, too: in one kernel with that, it lives beside gradients that need not be there yet.
And the product of the weight's gradient, which runs as soon as its input is there, would cut that kernel in two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..private_apis import FakeTensorMode
from .policy import is_pointwise, is_view, made_by

aten = torch.ops.aten


def order_weights(graph: Graph) -> None:
    """Let gradients of weights whose inputs are computed again be there before what reads the inputs' gradients."""
    for product in list(graph.nodes):
        for x, dy in _factors(product):
            if made_by(x).op == "placeholder" or not is_pointwise(made_by(x)):
                continue
            for dx in list(dy.users):
                users = (*dx.users, *_pointwise_readers(dx))
                if _is_of_input(dx, dy) and all(user > product for user in users):
                    _put_behind(graph, dx, product)


def _factors(product: Node) -> list[tuple[Node, Node]]:
    """(input, gradient of the output) of a linear layer, either way round, if this may be its weight's gradient."""
    if product.target is not aten.mm.default:
        return []
    left, right = product.args
    if left.target is not aten.permute.default or left.args[1] != [1, 0]:  # type: ignore[union-attr]
        return []
    (left,) = left.all_input_nodes  # type: ignore[union-attr]
    return [(left, right), (right, left)]  # type: ignore[list-item]


def _is_of_input(product: Node, dy: Node) -> bool:
    pointwise = _pointwise_readers(product) if product.target is aten.mm.default and product.args[0] is dy else []
    return bool(pointwise) and all(map(is_pointwise, pointwise))


def _pointwise_readers(x: Node) -> list[Node]:
    """What reads it, or a view of it."""
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
    """x, bit by bit, where what reads it cannot run before the tensor `before` is there.

    It reads one number of that tensor, and takes x whether or not the number is NaN. A kernel that it is fused into
    takes no longer for it.
    """
    mode = x.meta["val"].fake_mode
    for axis in range(before.meta["val"].dim()):
        before = call(graph, mode, aten.slice.Tensor, before, axis, 0, 1)
    return call(graph, mode, aten.where.self, call(graph, mode, aten.eq.Tensor, before, before), x, x)


def call(graph: Graph, mode: FakeTensorMode, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A call at the place where the graph is being written, with the value that compilers look at."""
    node = graph.call_function(target, args, kwargs)
    given, options = map_arg((args, kwargs), lambda x: x.meta["val"])
    with mode, torch.no_grad():
        node.meta["val"] = target(*given, **options)
    return node
