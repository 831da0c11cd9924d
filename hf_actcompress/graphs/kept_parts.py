"""Of a tensor of which backward reads a part alone, a copy of the part is kept. A view would hold the whole tensor.

Of an input that is a small part, such as the first token of each sequence: somebody else may keep the input anyway, and
then the copy costs little. What the layer has made, such as queries, keys and values in one product, nobody else keeps.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..compilation.policy import is_view, numel

_SIZE = torch.ops.aten.sym_size.int
# the part is smaller than an input, and than what the layer has made, by this factor at least
_OF_INPUT, _OF_MADE = 8, 2


def keep_parts(forward: GraphModule, backward: GraphModule, outputs: int, weights: Collection[str]) -> None:
    """Let a forward return copies of such parts, which the backward reads, in the place of the inputs.

    Args:
        forward, backward: The graphs that a joint graph was divided into.
        outputs: How many of the first results of the forward are the caller's.
        weights: The names of the inputs that are weights.
    """
    output = forward.graph.output_node()
    returned = list(output.args[0])  # type: ignore[arg-type]
    read = {node.name: node for node in backward.graph.nodes if node.op == "placeholder"}
    for place, x in enumerate(returned[outputs:], outputs):
        if x.name in read and x.name not in weights:
            given = read[x.name]
            held = x.op == "placeholder" or x in returned[:outputs]
            part = _part(given, _OF_INPUT if held else _OF_MADE)
            if part:
                returned[place] = _copied(forward.graph, backward.graph, x, part)
                sizes = [user for user in given.users if user.target is _SIZE]
                returned += [_handed(forward.graph, backward.graph, x, size) for size in sizes]
                backward.graph.erase_node(given)
    output.args = (tuple(returned),)


def _part(x: Node, few: int) -> list[Node]:
    """The views, one after the other, by which a backward reads a part of x alone that is smaller by a factor, beside
    its sizes; none if it reads more."""
    chain, node = list[Node](), x
    while True:
        readers = [user for user in node.users if user.target is not _SIZE or node is not x]
        if len(readers) != 1 or not _shows(readers[0]) or len(readers[0].all_input_nodes) != 1:
            return []
        node = readers[0]
        chain.append(node)
        value = node.meta["val"]
        if isinstance(value, (list, tuple)):
            continue
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return []
        if numel(value) * few <= numel(x.meta["val"]):
            return chain


def _shows(node: Node) -> bool:
    """Whether a node is a view of a tensor, or one of several views."""
    return is_view(node) or node.target is operator.getitem


def _copied(forward: Graph, backward: Graph, x: Node, chain: list[Node]) -> Node:
    """A copy in the forward of the part that the last one of some views shows, which the backward reads."""
    made = x
    with forward.inserting_before(forward.output_node()):
        for node in chain:
            made = forward.node_copy(node, lambda _, made=made: made)  # type: ignore[misc]
        copy = forward.create_node(
            "call_function",
            torch.ops.aten.clone.default,
            (made,),
            {"memory_format": torch.contiguous_format},
            name=f"part_of_{x.name}",
        )
    value = chain[-1].meta["val"]
    # it is kept as x would be: by the module that has made x, and through that codec
    copy.meta = {**chain[-1].meta, **x.meta, "val": value.new_empty(value.shape)}
    _read_from(backward, copy, chain[-1])
    for node in reversed(chain):
        backward.erase_node(node)
    return copy


def _handed(forward: Graph, backward: Graph, x: Node, size: Node) -> Node:
    """A size of x, which the backward had read from x, as a result of the forward."""
    with forward.inserting_before(forward.output_node()):
        made = forward.create_node("call_function", _SIZE, (x, size.args[1]), name=f"size_{size.args[1]}_of_{x.name}")
    made.meta = dict(size.meta)
    _read_from(backward, made, size)
    backward.erase_node(size)
    return made


def _read_from(backward: Graph, made: Node, node: Node) -> None:
    """Let a backward read what the forward has made in the place of a node of its own: both graphs have its name."""
    first = next(iter(backward.nodes))
    with backward.inserting_before(first):
        given = backward.placeholder(made.name)
    given.meta = dict(made.meta)
    node.replace_all_uses_with(given)
