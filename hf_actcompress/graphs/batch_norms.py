"""BatchNorm in a layer's graph: its running statistics are updated once, and its output is computed again in backward.

Torch's op computes the output and updates the running statistics, which no schema says. So it runs once, in the
forward. In backward the output is made of the input again, by the same op without running statistics.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from ..compilation.policy import tag_recompute

aten = torch.ops.aten
# (x, weight, bias, running mean, running variance, training, momentum, eps) -> output, mean, 1 / deviation, ...
BATCH_NORM = aten.native_batch_norm.default
BATCH_NORMS = {BATCH_NORM, aten.cudnn_batch_norm.default}
_BACKWARD = aten.native_batch_norm_backward.default
_RUNNING = slice(3, 5)


def recompute_outputs(graph: Graph, forward: set[Node]) -> None:
    """Tag BatchNorms: they are kept where they update statistics, and what reads their output reads another node."""
    for node in [x for x in graph.nodes if x in forward and x.target in BATCH_NORMS]:
        if not node.args[5]:
            for x in (node, *node.users):
                tag_recompute(x)
            continue
        results = {x.args[1]: x for x in node.users}
        for x in (node, *results.values()):
            x.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        # a norm without a gradient is no reader of its own output
        if 0 in results and 1 in results:
            _read_again(graph, node, results[0])
    for node in graph.nodes:
        if node.target is _BACKWARD and node.args[7]:
            # with the statistics of the batch; another forward may have written on the running ones by then
            node.args = (*node.args[:3], None, None, *node.args[5:])


def _read_again(graph: Graph, node: Node, y: Node) -> None:
    with graph.inserting_after(y):
        again = graph.call_function(BATCH_NORM, without_statistics(node.args))
    with graph.inserting_after(again):
        item = graph.call_function(operator.getitem, (again, 0))
    again.meta["val"], item.meta["val"] = tuple(node.meta["val"][:3]), y.meta["val"]
    for x in (again, item):
        x.meta |= {name: value for name, value in node.meta.items() if name == "nn_module_stack"}
        tag_recompute(x)
    y.replace_all_uses_with(item)


def without_statistics(args: Any) -> tuple[Any, ...]:
    """The arguments of a BatchNorm that updates no running statistics."""
    return (*args[:3], None, None, True, 0.0, args[7])


def read_again(node: Node) -> list[Node]:
    """What a copy of a call reads that updates no running statistics."""
    given = node.args[:3] if node.target in BATCH_NORMS and node.args[5] else node.all_input_nodes
    return [x for x in given if isinstance(x, Node)]


def copy_without_statistics(graph: Graph, node: Node, copied: Mapping[Node, Node]) -> Node:
    """A copy of a call in another graph, of copies of what it reads; a BatchNorm's updates no running statistics."""
    if node.target not in BATCH_NORMS or not node.args[5]:
        return graph.node_copy(node, copied.__getitem__)
    x, weight, bias = (copied[x] if isinstance(x, Node) else x for x in node.args[:3])
    new = graph.call_function(BATCH_NORM, without_statistics((x, weight, bias, *node.args[3:])))
    new.meta = dict(node.meta)
    return new


def compute_once(graph: Graph) -> None:
    """In a forward: what reads a BatchNorm's output again reads that of the op that updates the statistics."""
    norms = [x for x in graph.nodes if x.target in BATCH_NORMS and x.args[_RUNNING] != (None, None)]
    known = {x.args[:3]: x for x in norms}
    for again in [x for x in graph.nodes if x.target in BATCH_NORMS and x.args[_RUNNING] == (None, None)]:
        norm = known.get(again.args[:3])
        for item in list(again.users) if norm is not None else ():
            with graph.inserting_after(norm):
                y = graph.call_function(operator.getitem, (norm, item.args[1]))
            y.meta = dict(item.meta)
            item.replace_all_uses_with(y)
            graph.erase_node(item)
