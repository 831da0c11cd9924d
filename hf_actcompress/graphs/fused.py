"""Nodes of a backward that one kernel computes together, so that fewer tensors move."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from ..compilation.policy import made_of
from ..ops.kernel_nodes import GATED, GATED_AND_BWD, GATED_BWD, NORM_BWD, NORM_BWD_BOTH
from .rules import PRODUCTS

aten = torch.ops.aten


def fuse(graph: Graph) -> None:
    """Let a norm's kernel add the residual's gradient, and that of a gated product's gradients make the product again.

    The graph is changed in place.
    """
    for node in list(graph.nodes):
        if node.target is aten.add.Tensor and len(node.all_input_nodes) == 2 and not node.kwargs:
            _add_in_norm(graph, node)
        elif node.target is GATED_BWD:
            _product_with_gradients(graph, node)


def _add_in_norm(graph: Graph, total: Node) -> None:
    given: Any = total.args
    for made, other in (given, given[::-1]):
        norm = made.args[0] if made.target is operator.getitem and made.args[1] == 0 else made
        if norm.target not in (NORM_BWD, NORM_BWD_BOTH) or len(norm.args) != 5 or len(made.users) != 1:
            continue
        if str(made.meta["val"].shape) != str(other.meta["val"].shape) or not _same_dtypes(made, other, total):
            continue
        readers = set(norm.users)
        with graph.inserting_before(total):
            new = graph.call_function(norm.target, (*norm.args, other))
            new.meta = dict(norm.meta)
            if norm.target is NORM_BWD:
                total.replace_all_uses_with(new)
            else:
                for reader in readers:
                    again = graph.call_function(operator.getitem, (new, reader.args[1]))
                    again.meta = dict(reader.meta)
                    (total if reader is made else reader).replace_all_uses_with(again)
        for dead in dict.fromkeys((total, *readers, norm)):
            if not dead.users and dead.op == "call_function":
                graph.erase_node(dead)
        return


def _same_dtypes(*nodes: Any) -> bool:
    return len({node.meta["val"].dtype for node in nodes}) == 1


def _product_with_gradients(graph: Graph, gradients: Node) -> None:
    arguments: Any = gradients.args
    dh, gate, up, *row = arguments
    product = next((x for x in gate.users if x.target is GATED and list(x.args) == [gate, up, *row]), None)
    owner = dh
    while owner.target in (aten.view.default, aten._unsafe_view.default):
        owner = owner.args[0]
    alone = len(dh.users) == 1 and (owner is dh or len(owner.users) == 1)
    if product is None or not alone or owner.target not in PRODUCTS or not _same_dtypes(dh, product):
        return
    before = made_of([dh])
    if product in before:
        return
    with graph.inserting_before(gradients):
        both = graph.call_function(GATED_AND_BWD, gradients.args)
        both.meta = {"val": (product.meta["val"], *gradients.meta["val"])}
        h = graph.call_function(operator.getitem, (both, 0))
        h.meta = dict(product.meta)
    move_behind(graph, product, h)
    product.replace_all_uses_with(h)
    graph.erase_node(product)
    for reader in list(gradients.users):
        place: Any = reader.args[1]
        reader.args = (both, place + 1)
    graph.erase_node(gradients)


def move_behind(graph: Graph, product: Node, place: Node) -> None:
    """Move what is made of the product, and stands in front of `place`, behind it."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    moved, end = {product}, place
    for node in list(graph.nodes):
        if node.op == "call_function" and order[node] < order[place] and moved.intersection(node.all_input_nodes):
            moved.add(node)
            end.append(node)
            end = node
