"""What an attention function that no tracer sees into need not keep: queries and keys that backward has in any case."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from ..compilation.policy import CODEC, held_by_caller, of_forward
from ..ops.opaque import ATTEND, ATTEND_BWD
from .rules import feeds_backward, is_recomputed
from .trace import Joint


def give_again(joint: Joint) -> None:
    """Of a tagged graph: let the backward of each such function have, of the tensors that want a gradient, those that
    are recomputed from what another node of the backward reads, such as the input of a norm of queries.

    The function keeps the others: it may hold no more of a tensor than a copy of some rows.
    """
    forward = of_forward(joint.graph, joint.outputs)
    held = held_by_caller(joint.graph, joint.outputs).union(joint.placeholders[: joint.parameters])
    for node in list(joint.graph.nodes):
        if node.target is ATTEND_BWD:
            ran, dout, tensors, call = node.args
            places = [i for i, x in enumerate(tensors) if _is_there(x, forward, held)]  # type: ignore[arg-type, union-attr]
            node.args = (ran, dout, [tensors[i] for i in places], call)
            attend = next(x for x in forward if x.target is ATTEND and x.args[1] == call)
            attend.args = (*attend.args[:2], places)


def _is_there(x: Node, forward: set[Node], held: set[Node]) -> bool:
    return all(
        y in held or (CODEC not in y.meta and feeds_backward(y, forward, but=ATTEND_BWD)) for y in _made_of(x, forward)
    )


def _made_of(x: Node, forward: set[Node]) -> Iterator[Node]:
    """The kept nodes and placeholders of which backward makes x again."""
    pending, seen = [x], {x}
    while pending:
        node = pending.pop()
        if node in forward and is_recomputed(node):
            pending += [source for source in node.all_input_nodes if source not in seen]
            seen.update(node.all_input_nodes)
        else:
            yield node
