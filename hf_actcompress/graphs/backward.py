"""The code of a plan's backward: for all gradients or for some of the outputs, in one piece or in stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from ..compilation.policy import made_of
from .code import CodeWriter
from .divide import Halves

aten = torch.ops.aten
# for each stage but the last one, the inputs whose gradients it returns, by place
Stops = tuple[tuple[int, ...], ...]


class Part(NamedTuple):
    """What a backward computes if some of the outputs have no gradient.

    Attributes:
        graph: The graph; it may have more calls than are needed.
        places: By placeholder, where its value is in (what is kept, the kept sizes, the gradients of the outputs).
        returned: What it returns for each input.
        needed: The nodes of which that is made.
        zeros: The outputs without a gradient for which it wants zeros.
        raw: The places of kept tensors that the graph opens itself.
    """

    graph: Graph
    places: dict[Node, int]
    returned: list[Node | None]
    needed: set[Node]
    zeros: tuple[int, ...]
    raw: frozenset[int] = frozenset()


class BackwardCode:
    """Writes the code of one backward. It takes a list of what is kept, the kept sizes, and the gradients of the
    outputs, and empties the list: each tensor is freed after its last reader.

    Args:
        halves: The graphs.
        opens: By the place of a kept tensor: the function that opens what is kept in its place.
    """

    def __init__(self, halves: Halves, opens: dict[int, Callable[[Any], Any]]) -> None:
        self._halves = halves
        kept = [*halves.kept, *halves.sizes]
        self._tangents = halves.tangents
        self._places = {node: kept.index(x) for node, x in halves.read.items()}
        self._places.update({node: len(kept) + i for node, i in self._tangents.items()})
        self.opens = opens

    def order(self, parameters: int) -> tuple[tuple[int, ...], ...]:
        """The weights whose gradients are done one after the other, by place, the first ones first."""
        position = {node: i for i, node in enumerate(self._halves.backward.graph.nodes)}
        grads = self._halves.grads[:parameters]
        places = [i for i, node in enumerate(grads) if node is not None]
        return tuple((i,) for i in sorted(places, key=lambda i: position[grads[i]]))  # type: ignore[index]

    def part(self, missing: frozenset[int]) -> Part:
        """The part of the backward that is left if some outputs, by place, have no gradient."""
        graph, grads = self._halves.backward.graph, list(self._halves.grads)
        zero: set[Node] = set()
        places = self._places
        if missing:
            graph, grads, zero, places = self._without(missing)
        returned = [None if x in zero else x for x in grads]
        needed = made_of([x for x in returned if x is not None])
        count = len(self._halves.kept) + len(self._halves.sizes)
        zeros = tuple(i for node in needed if (i := places.get(node, -1) - count) in missing)
        return Part(graph, places, returned, needed, zeros)

    def write(
        self, missing: frozenset[int], stops: Stops, change: Callable[[Part], Part] = lambda part: part
    ) -> tuple[Callable[..., Any], tuple[int, ...]]:
        """The code for a backward in which some outputs, by place, have no gradient, and those of them for which it
        wants zeros. `change` may replace the graph, as a compiler does."""
        part = change(self.part(missing))
        returned = list(part.returned)
        opens = {place: open for place, open in self.opens.items() if place not in part.raw}
        writer = _Boxed(part.graph, part.places, opens, [x for x in returned if x is not None])
        if not stops:
            writer.write(needed=part.needed)
        else:
            self._write_stages(writer, part.needed, returned, stops)
        texts = [writer.text(x) for x in returned]
        return writer.function("s, box" if stops else "s", f"({', '.join(texts)},)"), part.zeros

    def _write_stages(self, writer: CodeWriter, needed: set[Node], returned: Sequence[Any], stops: Stops) -> None:
        pending = list(stops)
        done: set[Node] = set()

        def after(node: Node) -> None:
            done.add(node)
            while pending and all(returned[i] is None or returned[i] in done for i in pending[0]):
                places = pending.pop(0)
                nodes = [returned[i] for i in places]
                writer.lines.append(f"box.extend(({', '.join(map(writer.text, nodes))},))")
                # what nobody else reads is freed when it has been added up
                gone = [writer.name(x) for x in nodes if x is not None and all(user.op == "output" for user in x.users)]
                writer.lines += [f"{' = '.join(gone)} = None"] if gone else []
                writer.lines.append("yield")
                for i in places:
                    returned[i] = None  # type: ignore[index]

        writer.write(after, needed)

    def _without(self, missing: frozenset[int]) -> tuple[Graph, list[Any], set[Node], dict[Node, int]]:
        """A copy of the graph in which what is made of missing gradients alone is left out, its results, those that are
        zero, and the places of its placeholders."""
        graph = Graph()
        copied: dict[Node, Node] = {}
        graph.graph_copy(self._halves.backward.graph, copied)
        places = {copied[node]: place for node, place in self._places.items()}
        zero = {copied[node] for node, i in self._tangents.items() if i in missing}
        given = {copied[node] for node in self._tangents}
        for node in list(graph.nodes):
            of_gradients = [x for x in node.all_input_nodes if x in given]
            if node.op != "call_function" or not of_gradients:
                continue
            given.add(node)
            nothing = [x for x in of_gradients if x in zero]
            if len(nothing) == len(of_gradients):
                # a backward is linear in the gradients
                zero.add(node)
            elif nothing and _is_sum_of(node, other := next(x for x in of_gradients if x not in zero)):
                node.replace_all_uses_with(other)
                copied.update({old: other for old, new in copied.items() if new is node})
        graph.owning_module = self._halves.backward
        grads = [None if x is None else copied[x] for x in self._halves.grads]
        # a gradient that is read on the way stays until it is returned
        graph.output(tuple(grads))
        return graph, grads, zero, places


def _is_sum_of(node: Node, other: Node) -> bool:
    """Whether a node is the sum of `other` and another tensor of the same shape and dtype, without a factor."""
    if node.target is not aten.add.Tensor or len(node.all_input_nodes) != 2 or node.kwargs:
        return False
    value, like = node.meta["val"], other.meta["val"]
    return str(value.shape) == str(like.shape) and bool(value.dtype == like.dtype)


class _Boxed(CodeWriter):
    """A writer whose placeholders are read from a list, which forgets them.

    Args:
        graph: The graph.
        places: The place of each placeholder in the list.
        packed: By place: the function that opens what is there.
        results: What the code returns.
    """

    def __init__(
        self,
        graph: Graph,
        places: dict[Node, int],
        packed: dict[int, Callable[[Any], Any]],
        results: Sequence[Node],
    ) -> None:
        super().__init__(graph, {}, results)
        for node, i in places.items():
            text = f"{self.constant(packed[i])}(s[{i}])" if i in packed else f"s[{i}]"
            self._loads[node] = f"{text}; s[{i}] = None"
