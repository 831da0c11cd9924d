"""Which results of a graph take memory when a compiler fuses it, and how long they live: a model of Inductor."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from .policy import is_fused, is_pointwise, is_view, made_by, nbytes, overwrites

_CAT = torch.ops.aten.cat.default


class Buffers:
    """The buffers of one graph, whose nodes run in order.

    A pointwise result that only pointwise ops and reductions read stays in registers. The tensors that it is computed
    from live until the kernel that it is fused into has run. A kernel may write its result over an input of the same
    size that is not read later, unless the input is a concatenation.

    Args:
        graph: The graph of a forward or a backward.

    Attributes:
        no_memory: Nodes whose results take no memory of their own.
        dead: Node -> the nodes whose results can be freed after it.
        whole: Node -> the concatenation of which it writes the first part, so that all of it is allocated then.
    """

    def __init__(self, graph: Graph) -> None:
        order = {node: position for position, node in enumerate(graph.nodes)}
        nodes = list(order)
        # a concatenation -> its parts, if the ops that make them write into it
        parts = {node: node.all_input_nodes for node in nodes if node.target is _CAT}
        parts = {node: inputs for node, inputs in parts.items() if inputs and all(map(_is_written_in_place, inputs))}
        self.no_memory = {node for node in nodes if node.op == "call_function" and is_fused(node)} - parts.keys()
        last = self._last_readers(nodes, order)
        self._overwrite(nodes, order, last)
        self.dead: dict[Node, list[Node]] = {}
        for node, position in last.items():
            if nodes[position].op != "output":
                self.dead.setdefault(nodes[position], []).append(node)
        self.whole = {min(inputs, key=order.__getitem__): node for node, inputs in parts.items()}
        self.no_memory.update(*parts.values())

    def _last_readers(self, nodes: list[Node], order: dict[Node, int]) -> dict[Node, int]:
        """Node -> the position of the node whose kernel reads it last."""
        last: dict[Node, int] = {}
        for node in reversed(nodes):
            through = (user in self.no_memory or is_view(user) for user in node.users)
            ends = (last[user] if goes_on else order[user] for user, goes_on in zip(node.users, through, strict=True))
            last[node] = max(ends, default=order[node])
        return last

    def _overwrite(self, nodes: list[Node], order: dict[Node, int], last: dict[Node, int]) -> None:
        """Let a result take the buffer of an input that nobody reads later."""
        ending: dict[int, list[Node]] = {}
        for node in nodes:
            own = node.op == "call_function" and node not in self.no_memory and made_by(node) is node
            if own and node.target is not _CAT:
                ending.setdefault(last[node], []).append(node)
        for node in nodes:
            if node in self.no_memory or not overwrites(node) or nodes[last[node]].op == "output":
                continue
            for free in ending.get(order[node], ()):
                if free is not node and nbytes(free) == nbytes(node):
                    self.no_memory.add(node)
                    last[free] = last[node]
                    ending[order[node]].remove(free)
                    ending.setdefault(last[node], []).append(free)
                    break


def _is_written_in_place(part: Node) -> bool:
    """Whether a compiler lets the op write directly into the concatenation that its result is part of."""
    return part.op == "call_function" and not is_view(part) and not is_pointwise(part)
