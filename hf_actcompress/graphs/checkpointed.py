"""A checkpointed layer: it keeps its inputs and the states of its draws, and its backward begins with the forward.

Backward makes again what the layer would keep without checkpointing, and goes on as it would then. So no more is alive
in it than in the backward of a layer that is not checkpointed.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from enum import Enum
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Node

from ..compilation.policy import is_attention, made_of
from ..modules.checkpoint import KeptInput
from ..ops.opaque import ATTEND, LINEAR
from ..ops.traced_tiles import TILED
from .divide import Halves
from .redraw import is_drawn, state_before

# by op that makes such a call: where its arguments have the call's number
_NUMBER: dict[Any, int] = {ATTEND: 1, LINEAR: 1, TILED: 2}


class Recompute(Enum):
    """What the backward of a layer makes again."""

    NOTHING = "what the smallest cut makes again"
    ALL = "all but the layer's inputs"
    NOT_ATTENTION = "all but the layer's inputs and the results of attention"


def recompute_of(keeps: KeptInput | None) -> Recompute:
    """What backward makes again where a checkpointed layer keeps this; None: it is not checkpointed."""
    if keeps is None:
        return Recompute.NOTHING
    return Recompute.NOT_ATTENTION if keeps.attention else Recompute.ALL


def checkpointed(halves: Halves, again: Recompute) -> Halves:
    """The same layer, keeping its inputs, the states of its draws and, if asked to, the results of attention."""
    joined = _Joined(halves, again)
    copied = joined.copied
    for node in halves.backward.graph.nodes:
        if node.op == "placeholder":
            copied[node] = copied[halves.read[node]] if node in halves.read else joined.placeholder(node)
        elif node.op != "output":
            copied[node] = joined.graph.node_copy(node, copied.__getitem__)
    grads = [None if x is None else copied[x] for x in halves.grads]
    joined.graph.output(tuple(grads))
    module = GraphModule(_attributes(halves), joined.graph)
    new = dict(zip(joined.graph.nodes, module.graph.nodes, strict=True))
    return replace(
        halves,
        backward=module,
        kept=list(joined.kept),
        sizes=[],
        read={new[copied[x]]: x for x in joined.kept},
        tangents={new[copied[node]]: i for node, i in halves.tangents.items()},
        grads=[None if x is None else new[x] for x in grads],
    )


class _Joined:
    """The graph of a backward that begins with the forward, as far as it makes what the backward reads.

    Attributes:
        graph: The graph.
        copied: The node in it for each node of the forward.
        kept: The nodes of the forward that it reads: inputs, states of draws, and results of attention.
    """

    def __init__(self, halves: Halves, again: Recompute) -> None:
        self.graph = Graph()
        self.copied: dict[Node, Node] = {}
        self.kept: list[Node] = []
        # what a draw is given decides nothing but the size of its mask
        stays = is_of_attention if again == Recompute.NOT_ATTENTION else (lambda node: False)
        needed = made_of([*halves.kept, *halves.sizes], lambda node: is_drawn(node) or stays(node))
        for node in halves.forward.graph.nodes:
            if node not in needed:
                continue
            if node.op == "placeholder" or is_drawn(node) or node.target is state_before or stays(node):
                self.kept.append(node)
                self.copied[node] = self.placeholder(node)
            else:
                self.copied[node] = self.graph.node_copy(node, self.copied.__getitem__)

    def placeholder(self, node: Node) -> Node:
        """An input of the graph for the value of a node of one of the two halves."""
        new = self.graph.placeholder(node.name)
        new.meta = dict(node.meta)
        return new


def is_of_attention(node: Node) -> bool:
    """Whether a node is a result of a fused attention."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, Node) and is_attention(source)


def calls_in(graph: Graph) -> set[int]:
    """The calls, by number, that a graph makes of what no tracer sees into."""
    return {int(node.args[_NUMBER[node.target]]) for node in graph.nodes if node.target in _NUMBER}  # type: ignore[arg-type]


def _attributes(halves: Halves) -> nn.Module:
    root = nn.Module()
    for module in (halves.forward, halves.backward):
        for node in module.graph.nodes:
            if node.op == "get_attr":
                value: Any = getattr(module, str(node.target))
                setattr(root, str(node.target), value)
    return root
