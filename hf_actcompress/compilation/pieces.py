"""Makes the ops of a head and its loss again for some columns of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from .calls import called
from .ordering import after, call

aten, prims = torch.ops.aten, torch.ops.prims
# ops that treat each column by itself, beside those that torch tags as pointwise
_SHAPES = {aten.view.default, aten.reshape.default, aten.expand.default}
_COPIES = {aten.clone.default, prims.convert_element_type.default}
# results without columns that a shared graph makes itself
_CONSTANTS = {aten.full.default, aten.scalar_tensor.default}

# what pieces read beside the ops of the head and its loss: the numbers of all first columns, and that of one piece; a
# result without columns; for each "hidden" product, its sum over the pieces before; for each "bias" sum, a row of ones
STARTS, START, ROWS, TOTAL, ONES = "starts", "start", "rows", "total", "ones"
Given = dict[tuple[str, Node | None], Node]
# (kind, node, the logits' gradient that it reads). "weight" and "hidden": products of the gradient with hidden states
# and with the weight; "bias": sums of the gradient over rows
Sinks = list[tuple[str, Node, Node]]


def is_wide(node: Any, columns: int) -> bool:
    """Whether the result's last axis is the vocabulary."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, Tensor) and value.dim() > 0 and type(value.shape[-1]) is int and value.shape[-1] == columns


def is_by_column(node: Node, columns: int) -> bool:
    """Whether each column of the result is computed from the same column of the inputs."""
    if node.op != "call_function" or not is_wide(node, columns):
        return False
    if node.target in _SHAPES:
        last = tuple(node.all_input_nodes[0].meta["val"].shape[-1:])
        # the last axis stays the vocabulary, or one number is expanded to it
        return last == (columns,) or (node.target is aten.expand.default and last in ((), (1,)))
    return node.target in _COPIES or torch.Tag.pointwise in getattr(node.target, "tags", ())


def wide_dtype(sink: Node) -> torch.dtype:
    """The dtype in which the products of the pieces are added."""
    return torch.promote_types(sink.meta["val"].dtype, torch.float32)


class Piece:
    """Columns `start` to `end`, computed after the node `before`."""

    def __init__(self, graph: Graph, logits: Node, start: int, end: int, before: Node | None = None) -> None:
        self._graph, self._logits, self._before = graph, logits, before
        self.start, self.end = start, end
        self._columns: int = logits.meta["val"].shape[1]
        self._known: dict[Node, Node] = {}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return call(self._graph, self._logits.meta["val"].fake_mode, target, *args, **kwargs)

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        return x if x.meta["val"].dtype == dtype else self.call(prims.convert_element_type.default, x, dtype)

    def of_sink(self, kind: str, sink: Node, gradient: Node) -> Node:
        part = self.of(gradient)
        if kind == "weight":
            return self.call(sink.target, self.call(aten.permute.default, part, [1, 0]), sink.args[1])
        if kind == "hidden":
            return self.call(sink.target, part, self.call(aten.slice.Tensor, sink.args[1], 0, self.start, self.end))
        return self.call(sink.target, part, *sink.args[1:], **sink.kwargs)

    def row_sum(self, gradient: Node, ones: Node) -> Node:
        """A "bias" sink as a product. Unlike a sum in a called graph, it is written where it is concatenated."""
        part = self.of(gradient)
        return self.call(aten.mm.default, ones, self.call(aten.view.default, part, [-1, self.end - self.start]))

    def of(self, node: Node) -> Node:
        """These columns of a node's result; the result itself if it has no columns."""
        if not is_wide(node, self._columns):
            return self.narrow(node)
        if node not in self._known:
            self._known[node] = self._made(node)
        return self._known[node]

    def _made(self, node: Node) -> Node:
        if node is self._logits:
            return self.product()
        if node.target is prims.iota.default:
            return self.iota(node)
        if node.target is aten.full.default:
            return self.call(node.target, self._shape(node.args[0]), *node.args[1:], **node.kwargs)
        if not is_by_column(node, self._columns):
            return self.cut(node)
        if node.target in _SHAPES:
            return self.call(node.target, self.of(node.args[0]), self._shape(node.args[1]), **node.kwargs)  # type: ignore[arg-type]
        args, kwargs = map_arg((node.args, node.kwargs), self.of)
        return self.call(node.target, *args, **kwargs)

    def product(self) -> Node:
        """The logits."""
        *bias, hidden, weight = self._logits.args
        bias = [self.cut(x) for x in bias]  # type: ignore[arg-type]
        part = self.call(self._logits.target, *bias, hidden, self.cut(weight), **self._logits.kwargs)  # type: ignore[arg-type]
        return part if self._before is None else after(self._graph, part, self._before)

    def narrow(self, node: Node) -> Node:
        """A result without columns."""
        return node

    def iota(self, node: Node) -> Node:
        """The columns' numbers."""
        start = node.kwargs["start"] + self.start * node.kwargs["step"]  # type: ignore[operator]
        return self.call(node.target, self.end - self.start, **{**node.kwargs, "start": start})

    def cut(self, x: Node) -> Node:
        """These columns of a tensor that is in memory."""
        return self.call(aten.slice.Tensor, x, x.meta["val"].dim() - 1, self.start, self.end)

    def _shape(self, shape: Any) -> list[Any]:
        return [*shape[:-1], self.end - self.start]


class Shared(Piece):
    """The pointwise ops of all pieces of `width` columns, in a graph of their own, which each of these pieces calls.

    It reads a piece of the logits and returns their gradient. It also takes the sum of the hidden states' gradients of
    all pieces before, and does not read it: so a piece waits for the one before it.

    Attributes:
        module: The graph.
        rows: The nodes that it reads as a whole.
    """

    def __init__(self, logits: Node, width: int, sinks: Sinks) -> None:
        super().__init__(Graph(), logits, 0, width)
        # how a piece finds each input
        self._inputs: dict[Node, Callable[[Piece, Given], Node]] = {}
        self.rows: list[Node] = []
        results = {gradient: self.of(gradient) for _, _, gradient in sinks}
        for sink in (sink for kind, sink, _ in sinks if kind == "hidden"):
            total = sink.meta["val"].new_empty(sink.meta["val"].shape, dtype=wide_dtype(sink))
            self._input(total, lambda _, given, sink=sink: given[TOTAL, sink])  # type: ignore[misc]
        self._gradients = list(results)
        self._graph.output(tuple(results.values()))
        self.module = GraphModule(torch.nn.Module(), self._graph)

    def insert_call(self, piece: Piece, given: Given, before: Node) -> None:
        """Insert the call for that piece, which then knows its gradients."""
        places = (node for node in self._graph.nodes if node.op == "placeholder")
        inputs = [self._inputs[place](piece, given) for place in places]
        results = called(piece._graph, self.module, inputs, before)
        piece._known.update(zip(self._gradients, results, strict=True))

    def _input(self, value: Tensor, of: Callable[[Piece, Given], Node]) -> Node:
        with self._graph.inserting_before():
            place = self._graph.placeholder(f"input_{len(self._inputs)}")
        place.meta["val"] = value
        self._inputs[place] = of
        return place

    def product(self) -> Node:
        value = self._logits.meta["val"]
        return self._input(value.new_empty(value.shape[0], self.end), lambda piece, _: piece.of(self._logits))

    def narrow(self, node: Node) -> Node:
        if node.target in _CONSTANTS:
            return self.call(node.target, *node.args, **node.kwargs)
        if node not in self._known:
            self.rows.append(node)
            self._known[node] = self._input(node.meta["val"], lambda _, given: given[ROWS, node])
        return self._known[node]

    def iota(self, node: Node) -> Node:
        value = node.meta["val"]
        if node.kwargs["step"] != 1 or value.dtype != torch.int64:
            return self.cut(node)
        start = self._input(value.new_empty(1), lambda _, given: given[START, None])
        return self.call(aten.add.Tensor, super().iota(node), start)

    def cut(self, x: Node) -> Node:
        return self._input(x.meta["val"][..., : self.end], lambda piece, _: piece.cut(x))
