"""Which inputs an attention function that no tracer sees into need not keep, because backward has them in any case."""

from __future__ import annotations

from torch.fx import Node

from ..compilation.policy import CODEC, held_by_caller, made_of, of_forward
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
    """Whether all that backward recomputes x from is held or read without it, and is kept as it is."""

    def ends(y: Node) -> bool:
        return y not in forward or not is_recomputed(y)

    sources = [y for y in made_of([x], ends) if ends(y)]
    return all(y in held or (CODEC not in y.meta and feeds_backward(y, forward, but=ATTEND_BWD)) for y in sources)
