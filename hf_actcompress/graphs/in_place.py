"""Pointwise calls that write into a tensor that nobody reads any more.

A function such as gelu is a chain of pointwise calls in stock's code. Written in place, a chain needs one tensor where
it would need two at a time, with the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from ..compilation.policy import is_pointwise, is_view, made_by
from .rules import PRODUCTS

aten = torch.ops.aten
# calls of two tensors that may write into the second one
_COMMUTATIVE = {aten.mul.Tensor, aten.add.Tensor}


class Overwrite(NamedTuple):
    """How a call writes into one of its arguments.

    Attributes:
        op: The op that writes into its first argument.
        place: Which argument of the call that is.
    """

    op: Any
    place: int


def written_over(graph: Graph, results: Iterable[Node]) -> dict[Node, Overwrite]:
    """The calls of a graph that may write into an argument: one that the graph has made, and that is no result."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    last: dict[Node, int] = {}
    for node in graph.nodes:
        if not is_view(node):
            for x in node.all_input_nodes:
                last[made_by(x)] = order[node]
    stay = {made_by(x) for x in results}
    found: dict[Node, Overwrite] = {}
    for node in graph.nodes:
        op = _in_place(node)
        for place in _places(node) if op is not None else ():
            x = node.args[place]
            owner = made_by(x)
            alone = [made_by(y) for y in node.all_input_nodes].count(owner) == 1
            if owner not in stay and last[owner] == order[node] and alone and is_made(owner) and _same(x, owner, node):
                found[node] = Overwrite(op, place)
                break
    return found


def _places(node: Node) -> list[int]:
    places = (0, 1) if node.target in _COMMUTATIVE and not node.kwargs else (0,)
    return [i for i in places if isinstance(node.args[i], Node)]


def _in_place(node: Node) -> Any:
    """The op that does the same in place; None if there is none."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or not is_pointwise(node):
        return None
    packet = getattr(aten, target.overloadpacket.__name__ + "_", None)
    overload = str(target).rpartition(".")[2]  # "aten.add.Tensor"
    return getattr(packet, overload, None)


def is_made(owner: Node) -> bool:
    """Whether a call has made a tensor of its own."""
    return owner.op == "call_function" and (owner.target in PRODUCTS or is_pointwise(owner))


def _same(x: Node, owner: Node, node: Node) -> bool:
    """Whether the result has the form of x, and x shows all of its owner."""
    one, two = x.meta["val"], node.meta["val"]
    return _form(one) == _form(two) and str(one.numel()) == str(owner.meta["val"].numel())


def _form(x: Any) -> tuple[Any, ...]:
    # sizes may be symbols, which must not be compared: that would be a guard
    return x.dtype, x.device, str(x.shape), str(x.stride())
