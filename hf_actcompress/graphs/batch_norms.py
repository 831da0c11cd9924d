"""BatchNorm in a layer's graph: its running statistics are updated once, and its output is computed again in backward.

Torch's op computes the output and updates the running statistics, which no schema says. So it runs once, in the
forward. What reads the output reads a node that is made of the input again, and names the first op by its mean, so that
torch's partitioner sees that the forward needs that op. In the forward both are one call (`compute_once`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from ..compilation.policy import tag_recompute
from ..ops.nodes import node

aten = torch.ops.aten
# (x, weight, bias, running mean, running variance, training, momentum, eps) -> output, mean, 1 / deviation, ...
BATCH_NORMS = {aten.native_batch_norm.default, aten.cudnn_batch_norm.default}
_BACKWARD = aten.native_batch_norm_backward.default


@node(
    "batch_norm_again(Tensor x, Tensor? weight, Tensor? bias, Tensor mean, float eps) -> Tensor",
    lambda x, weight, bias, mean, eps: torch.empty_like(x),
    pointwise=False,
)
def AGAIN(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, eps: float) -> Tensor:
    """The output of a BatchNorm with the statistics of the batch.

    The mean is not read. It ties this node to the op that updates the running statistics.
    """
    y: Tensor = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)[0]
    return y


def updates_statistics(norm: Node) -> bool:
    """Whether a node updates running statistics."""
    return norm.target in BATCH_NORMS and bool(norm.args[5]) and norm.args[3] is not None


def recompute_outputs(graph: Graph, forward: set[Node]) -> None:
    """Tag BatchNorms: they are kept where they update statistics, and what reads their output reads another node."""
    for norm in [x for x in graph.nodes if x in forward and x.target in BATCH_NORMS]:
        if not updates_statistics(norm):
            for x in (norm, *norm.users):
                tag_recompute(x)
            continue
        results = {x.args[1]: x for x in norm.users}
        for x in (norm, *results.values()):
            x.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        # a norm without a gradient is no reader of its own output
        if 0 in results and 1 in results:
            _read_again(graph, norm, results[0], results[1])
    for x in graph.nodes:
        if x.target is _BACKWARD and x.args[7]:
            # with the statistics of the batch; another forward may have written on the running ones by then
            x.args = (*x.args[:3], None, None, *x.args[5:])


def _read_again(graph: Graph, norm: Node, y: Node, mean: Node) -> None:
    last = next(x for x in reversed(graph.nodes) if x in (y, mean))
    with graph.inserting_after(last):
        again = graph.call_function(AGAIN, (*norm.args[:3], mean, norm.args[7]))
    again.meta = {name: value for name, value in norm.meta.items() if name == "nn_module_stack"}
    again.meta["val"] = y.meta["val"]
    tag_recompute(again)
    y.replace_all_uses_with(again)


def compute_once(graph: Graph) -> None:
    """In a forward: what reads a BatchNorm's output again reads that of the op that updates the statistics."""
    for again in [x for x in graph.nodes if x.target is AGAIN]:
        norm: Any = again.args[3].args[0]
        with graph.inserting_after(norm):
            y = graph.call_function(operator.getitem, (norm, 0))
        y.meta = dict(again.meta)
        again.replace_all_uses_with(y)
        graph.erase_node(again)


def read_again(x: Node) -> list[Node]:
    """What a copy of a call reads that updates no running statistics."""
    given = x.args[:3] if updates_statistics(x) else x.all_input_nodes
    return [y for y in given if isinstance(y, Node)]


def copy_without_statistics(graph: Graph, x: Node, copied: Mapping[Node, Node]) -> Node:
    """A copy of a call in another graph, of copies of what it reads; a BatchNorm's updates no running statistics."""
    if not updates_statistics(x):
        return graph.node_copy(x, copied.__getitem__)
    given = [copied[y] if isinstance(y, Node) else y for y in x.args[:3]]
    new = graph.call_function(x.target, (*given, None, None, True, 0.0, x.args[7]))  # type: ignore[arg-type]
    new.meta = dict(x.meta)
    return new
