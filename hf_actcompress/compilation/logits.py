"""Computes logits again in backward, a few columns of the vocabulary at a time: the graph never holds them whole.

A loss computes sums over each row of logits; once these are known, its gradient is pointwise. So the columns of the
vocabulary can be handled one group after the other: the product that makes the logits, the pointwise gradient of the
loss, and the products that make the gradients of the weight and of the hidden states.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from .calls import can_call, in_memory
from .ordering import after
from .padding import without_padding
from .pieces import ONES, ROWS, START, STARTS, TOTAL, Given, Piece, Shared, Sinks, is_by_column, wide_dtype
from .policy import LOGITS, hint

aten, prims = torch.ops.aten, torch.ops.prims
# at most PIECES pieces, each of whole tiles of a product. Every piece has its own kernel, which takes seconds to
# compile, so none has fewer than LARGE elements. Smaller logits, and those of small vocabularies, stay whole
PIECES, _TILE, LARGE, _TIMES_HIDDEN = 8, 128, 1 << 20, 4
# pieces that call one graph take little time to compile. A called graph cannot write a gradient over its logits, so
# there are twice as many, and _MORE because the hidden states' gradients are added up; CALLS are enough for any logits
CALLS, _MORE, _VECTOR = 16, 4, 8


def divide_logits(graph: Graph) -> None:
    """Let a backward graph compute the logits in pieces, if they are large and all ops on them are known.

    The weight's gradient is made of the same sums as before. The hidden states' gradient is a sum of one product per
    piece.
    """
    for node in _large_logits(graph):
        sinks = _sinks(node)
        if sinks:
            _Pieces(graph, node, sinks).insert()
    graph.eliminate_dead_code()


def take_out_padding(graph: Graph) -> None:
    """Make the products around large logits without the padding that Inductor has added.

    It runs before the other passes over a backward graph, because these know the products only without padding.
    """
    for node in _large_logits(graph):
        without_padding(graph, node)
    graph.eliminate_dead_code()


def _large_logits(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if LOGITS in node.meta and node.op == "call_function" and _is_large(node)]


def _is_large(logits: Node) -> bool:
    if logits.target not in (aten.mm.default, aten.addmm.default):
        return False
    columns = hint(logits.meta["val"].shape[1])
    hidden = hint(_factors(logits)[0].meta["val"].shape[1])
    known = type(logits.meta["val"].shape[1]) is int
    return known and columns >= _TIMES_HIDDEN * hidden and _count(logits) >= LARGE


def _count(logits: Node) -> int:
    """The number of elements, for the sizes at which the graph was traced."""
    rows, columns = (hint(size) for size in logits.meta["val"].shape)
    return rows * columns


def _factors(product: Node) -> tuple[Node, Node]:
    return product.args[-2:]  # type: ignore[return-value]


def _sinks(logits: Node) -> Sinks | None:
    """The nodes that read the logits' gradient; None if an op on the logits is not known here."""
    columns = logits.meta["val"].shape[1]
    along, sinks = [logits], []
    for node in along:
        for user in node.users:
            if is_by_column(user, columns):
                along += [user] if user not in along else []
            elif user.target is aten.permute.default and user.args[1] == [1, 0] and node.meta["val"].dim() == 2:
                products = [product for product in user.users if _is_product(product, user)]
                if len(products) < len(user.users):
                    return None
                sinks += [("weight", product, node) for product in products]
            elif _is_product(user, node):
                sinks.append(("hidden", user, node))
            elif user.target is aten.sum.dim_IntList and _sums_rows(user, node):
                sinks.append(("bias", user, node))
            else:
                return None
    # "bias" comes first: a compiler fuses sums over rows into the kernel that makes the gradient
    return sorted(sinks, key=lambda sink: sink[0])


def _is_product(node: Node, left: Node) -> bool:
    return node.target is aten.mm.default and node.args[0] is left and node.args[1] is not left


def _sums_rows(node: Node, x: Node) -> bool:
    last = x.meta["val"].dim() - 1
    return bool(node.args[1]) and all(0 <= dim < last for dim in node.args[1])  # type: ignore[union-attr, operator]


def _dtype(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _copies(logits: Node) -> int:
    """The number of pieces if each has kernels of its own."""
    return max(2, min(PIECES, _count(logits) // LARGE))


def _width(logits: Node) -> int:
    """The columns of a piece that calls a graph: all pieces have the same number, if there is a fitting one."""
    columns: int = logits.meta["val"].shape[1]
    most = columns // min(CALLS, 2 * _copies(logits) + _MORE)
    equal = (width for width in range(_VECTOR, most + 1, _VECTOR) if columns % width == 0 and 2 * width > most)
    return max(equal, default=-(-most // _TILE) * _TILE)


class _Pieces:
    """One product that makes logits, with all that is computed from it, divided into pieces."""

    def __init__(self, graph: Graph, logits: Node, sinks: Sinks) -> None:
        self._graph, self._logits, self._sinks = graph, logits, sinks
        self._columns: int = logits.meta["val"].shape[1]
        whole = Piece(graph, logits, 0, self._columns)
        self._call, self._cast = whole.call, whole.cast
        # the pieces are inserted at the last sink, where everything that they read exists
        order = {node: i for i, node in enumerate(graph.nodes)}
        self._place = max((sink for _, sink, _ in sinks), key=order.__getitem__)
        self._early = any(order[user] < order[self._place] for _, sink, _ in sinks for user in sink.users)

    def insert(self) -> None:
        if self._early:
            # a node that reads one of the results comes before that place, so the logits stay whole
            return
        with self._graph.inserting_before(self._place):
            parts = self._of_calls() or self._of_copies()
            for kind, sink, _ in self._sinks:
                sink.replace_all_uses_with(self._together(kind, sink, parts[sink]))

    def _of_copies(self) -> dict[Node, list[Node]]:
        """The sinks' parts, from pieces that have kernels of their own."""
        step = -(-self._columns // (_copies(self._logits) * _TILE)) * _TILE
        parts: dict[Node, list[Node]] = {sink: [] for _, sink, _ in self._sinks}
        before: Node | None = None
        for start in range(0, self._columns, step):
            piece = Piece(self._graph, self._logits, start, min(start + step, self._columns), before)
            for kind, sink, gradient in self._sinks:
                before = piece.of_sink(kind, sink, gradient)
                parts[sink].append(before)
        return parts

    def _of_calls(self) -> dict[Node, list[Node]]:
        """The sinks' parts, from pieces that call a graph; nothing where they cannot."""
        kinds = {kind for kind, _, _ in self._sinks}
        same = all(_dtype(sink) == _dtype(gradient) for _, sink, gradient in self._sinks)
        if type(self._logits.meta["val"].shape[0]) is not int or "hidden" not in kinds or not same:
            return {}
        starts = range(0, self._columns, _width(self._logits))
        widths = {min(starts.step, self._columns - start) for start in starts}
        graphs = {width: Shared(self._logits, width, self._sinks) for width in widths}
        if not all(can_call(graph.module) for graph in graphs.values()):
            return {}
        given = self._before_calls(starts, [row for graph in graphs.values() for row in graph.rows])
        parts: dict[Node, list[Node]] = {sink: [] for _, sink, _ in self._sinks}
        for i, start in enumerate(starts):
            piece = Piece(self._graph, self._logits, start, min(start + starts.step, self._columns))
            given[START, None] = self._call(aten.slice.Tensor, given[STARTS, None], 0, i, i + 1)
            graphs[piece.end - start].insert_call(piece, given, self._place)
            for kind, sink, gradient in self._sinks:
                if kind == "weight":
                    parts[sink].append(piece.of_sink(kind, sink, gradient))
                elif kind == "bias":
                    parts[sink].append(piece.row_sum(gradient, given[ONES, sink]))
                else:
                    part = self._cast(piece.of_sink(kind, sink, gradient), wide_dtype(sink))
                    given[TOTAL, sink] = self._call(aten.add.Tensor, given[TOTAL, sink], part)
        return {**parts, **{sink: [total] for (name, sink), total in given.items() if sink and name == TOTAL}}

    def _before_calls(self, starts: range, rows: list[Node]) -> Given:
        """What the first piece reads."""
        given: Given = {(ROWS, row): row for row in rows}
        value = self._logits.meta["val"]
        kinds = {"dtype": torch.int64, "device": value.device, "requires_grad": False}
        given[STARTS, None] = self._call(prims.iota.default, len(starts), start=0, step=starts.step, **kinds)
        for kind, sink, _ in self._sinks:
            if kind == "hidden":
                zeros = self._full(list(sink.meta["val"].shape), 0, wide_dtype(sink))
                # not a constant, which Inductor would write into the first addition: each addition has the same code
                given[TOTAL, sink] = after(self._graph, zeros, self._logits.all_input_nodes[-1])
            elif kind == "bias":
                given[ONES, sink] = self._full([1, value.shape[0]], 1, _dtype(sink))
        # in memory before the first product: then one C++ function makes all of it, and what comes before
        return {key: in_memory(self._graph, x) for key, x in given.items()}

    def _full(self, shape: list[int], number: int, dtype: torch.dtype) -> Node:
        return self._call(aten.full.default, shape, number, dtype=dtype, device=self._logits.meta["val"].device)

    def _together(self, kind: str, sink: Node, parts: list[Node]) -> Node:
        if kind == "weight":
            return self._call(aten.cat.default, parts)
        if kind == "bias":
            return self._call(aten.view.default, self._call(aten.cat.default, parts, -1), list(sink.meta["val"].shape))
        dtype = sink.meta["val"].dtype
        wide = wide_dtype(sink)
        total, *others = (self._cast(part, wide) for part in parts)
        for other in others:
            total = self._call(aten.add.Tensor, total, other)
        return self._cast(total, dtype)
