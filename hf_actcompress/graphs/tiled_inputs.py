"""The inputs of MLPs in tiles, in a backward: little but them is alive while the tiles run."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch.fx import Graph, Node

from ..compilation.attribution import running
from ..compilation.policy import is_cheap, is_view, made_of
from ..ops.traced_tiles import TILED_BWD
from .in_place import is_made
from .rules import NORMS


def own_inputs(graph: Graph) -> None:
    """Give each MLP in tiles an input that no other call reads, and let the gradient be written over it.

    The input is a norm's output. The norm's backward reads results of the same cheap calls, which would be alive while
    the tiles run. So these calls are made twice: for the tiles, and behind them for the norm.
    """
    for node in list(graph.nodes):
        if node.target is TILED_BWD:
            chain = list(_chain(graph, node))
            if any(user not in chain and user is not node for x in chain for user in x.users):
                _copy(graph, node, chain)
            if _is_its_own(node.args[1]):  # type: ignore[arg-type]
                node.kwargs = {"over_x": True}


def _chain(graph: Graph, reader: Node) -> Iterator[Node]:
    """The cheap calls of one module that make the input, in order."""
    x: Node = reader.args[1]  # type: ignore[assignment]
    while is_view(x):
        x = x.all_input_nodes[0]
    module = running(x)

    def ends(node: Node) -> bool:
        return not is_view(node) and (not is_cheap(node) or running(node) != module)

    found = made_of([reader.args[1]], ends)  # type: ignore[list-item]
    yield from (node for node in graph.nodes if node in found and node.op == "call_function" and not ends(node))


def _copy(graph: Graph, reader: Node, chain: list[Node]) -> None:
    copied: dict[Node, Node] = {}
    for node in chain:
        with graph.inserting_before(reader):
            copied[node] = graph.node_copy(node, lambda x: copied.get(x, x))
    reader.args = (reader.args[0], copied[reader.args[1]], *reader.args[2:])  # type: ignore[index]
    for node in reversed(chain):
        if not node.users:
            graph.erase_node(node)
            continue
        order = {x: i for i, x in enumerate(graph.nodes)}
        min(node.users, key=order.__getitem__).prepend(node)


def _is_its_own(x: Node) -> bool:
    """Whether the graph has made x, for one reader, and x shows all of it."""
    size = str(x.meta["val"].numel())
    while len(x.users) == 1 and is_view(x):
        x = x.all_input_nodes[0]
    normed = x.target is operator.getitem and x.args[0].target in NORMS  # type: ignore[union-attr, operator]
    return len(x.users) == 1 and (normed or is_made(x)) and str(x.meta["val"].numel()) == size
