"""Computes logits again in backward, a few columns of the vocabulary at a time: the graph never holds them whole.

A loss computes sums over each row of logits; once these are known, its gradient is pointwise. So the columns of the
vocabulary can be handled one group after the other: the product that makes the logits, the pointwise gradient of the
loss, and the products that make the gradients of the weight and of the hidden states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .ordering import after, call
from .policy import LOGITS, hint

aten, prims = torch.ops.aten, torch.ops.prims
# at most PIECES pieces, each of whole tiles of a product. Every piece has its own kernel, which takes seconds to
# compile, so none has fewer than LARGE elements. Smaller logits, and those of small vocabularies, stay whole
PIECES, _TILE, LARGE, _TIMES_HIDDEN = 8, 128, 1 << 20, 4
# ops that treat each column by itself, beside those that torch tags as pointwise
_SHAPES = {aten.view.default, aten.reshape.default, aten.expand.default}
_COPIES = {aten.clone.default, prims.convert_element_type.default}

# (kind, node, the logits' gradient that it reads). "weight" and "hidden": products of the gradient with hidden states
# and with the weight; "bias": sums of the gradient over rows
_Sinks = list[tuple[str, Node, Node]]


def divide_logits(graph: Graph) -> None:
    """Let a backward graph compute the logits in pieces, if they are large and all ops on them are known.

    The weight's gradient is made of the same sums as before. The hidden states' gradient is a sum of one product per
    piece.
    """
    for node in list(graph.nodes):
        if LOGITS in node.meta and node.op == "call_function" and _is_large(node):
            sinks = _sinks(node)
            if sinks:
                _Pieces(graph, node, sinks).insert()
    graph.eliminate_dead_code()


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


def _sinks(logits: Node) -> _Sinks | None:
    """The nodes that read the logits' gradient; None if an op on the logits is not known here."""
    columns = logits.meta["val"].shape[1]
    along, sinks = [logits], []
    for node in along:
        for user in node.users:
            if _is_by_column(user, columns):
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


def _is_wide(node: Any, columns: int) -> bool:
    """Whether the result's last axis is the vocabulary."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, Tensor) and value.dim() > 0 and type(value.shape[-1]) is int and value.shape[-1] == columns


def _is_by_column(node: Node, columns: int) -> bool:
    if node.op != "call_function" or not _is_wide(node, columns):
        return False
    if node.target in _SHAPES:
        last = tuple(node.all_input_nodes[0].meta["val"].shape[-1:])
        # the last axis stays the vocabulary, or one number is expanded to it
        return last == (columns,) or (node.target is aten.expand.default and last in ((), (1,)))
    return node.target in _COPIES or torch.Tag.pointwise in getattr(node.target, "tags", ())


class _Pieces:
    """One product that makes logits, with all that is computed from it, divided into pieces."""

    def __init__(self, graph: Graph, logits: Node, sinks: _Sinks) -> None:
        self._graph, self._logits, self._sinks = graph, logits, sinks
        self._columns: int = logits.meta["val"].shape[1]
        # the pieces are inserted at the last sink, where everything that they read exists
        order = {node: i for i, node in enumerate(graph.nodes)}
        self._place = max((sink for _, sink, _ in sinks), key=order.__getitem__)
        self._early = any(order[user] < order[self._place] for _, sink, _ in sinks for user in sink.users)

    def insert(self) -> None:
        if self._early:
            # a node that reads one of the results comes before that place, so the logits stay whole
            return
        pieces = max(2, min(PIECES, _count(self._logits) // LARGE))
        step = -(-self._columns // (pieces * _TILE)) * _TILE
        parts: dict[Node, list[Node]] = {sink: [] for _, sink, _ in self._sinks}
        before: Node | None = None
        with self._graph.inserting_before(self._place):
            for start in range(0, self._columns, step):
                piece = _Piece(self, start, min(start + step, self._columns), before)
                for kind, sink, gradient in self._sinks:
                    part = piece.of_sink(kind, sink, gradient)
                    parts[sink].append(part)
                    before = part
            for kind, sink, _ in self._sinks:
                sink.replace_all_uses_with(self._together(kind, sink, parts[sink]))

    def _together(self, kind: str, sink: Node, parts: list[Node]) -> Node:
        if kind == "weight":
            return self.call(aten.cat.default, parts)
        if kind == "bias":
            return self.call(aten.cat.default, parts, -1)
        dtype = sink.meta["val"].dtype
        wide = torch.promote_types(dtype, torch.float32)
        total, *others = (self._cast(part, wide) for part in parts)
        for other in others:
            total = self.call(aten.add.Tensor, total, other)
        return self._cast(total, dtype)

    def _cast(self, x: Node, dtype: torch.dtype) -> Node:
        return x if x.meta["val"].dtype == dtype else self.call(prims.convert_element_type.default, x, dtype)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return call(self._graph, self._logits.meta["val"].fake_mode, target, *args, **kwargs)


class _Piece:
    """Columns `start` to `end`, computed after the node `before`."""

    def __init__(self, whole: _Pieces, start: int, end: int, before: Node | None) -> None:
        self._whole, self._start, self._end, self._before = whole, start, end, before
        self._known: dict[Node, Node] = {}

    def of_sink(self, kind: str, sink: Node, gradient: Node) -> Node:
        call, part = self._whole.call, self.of(gradient)
        if kind == "weight":
            return call(sink.target, call(aten.permute.default, part, [1, 0]), sink.args[1])
        if kind == "hidden":
            return call(sink.target, part, call(aten.slice.Tensor, sink.args[1], 0, self._start, self._end))
        return call(sink.target, part, *sink.args[1:], **sink.kwargs)

    def of(self, node: Any) -> Any:
        """These columns of a node's result; the node itself if it has no columns."""
        if not _is_wide(node, self._whole._columns):
            return node
        if node not in self._known:
            self._known[node] = self._made(node)
        return self._known[node]

    def _made(self, node: Node) -> Node:
        whole = self._whole
        if node is whole._logits:
            *bias, hidden, weight = node.args
            part = whole.call(node.target, *(self._cut(x) for x in bias), hidden, self._cut(weight), **node.kwargs)
            return part if self._before is None else after(whole._graph, part, self._before)
        if node.target is prims.iota.default:
            step = node.kwargs["step"]
            start = node.kwargs["start"] + self._start * step  # type: ignore[operator]
            return whole.call(node.target, self._end - self._start, **{**node.kwargs, "start": start})
        if node.target is aten.full.default:
            return whole.call(node.target, self._shape(node.args[0]), *node.args[1:], **node.kwargs)
        if not _is_by_column(node, whole._columns):
            return self._cut(node)
        if node.target in _SHAPES:
            return whole.call(node.target, self.of(node.args[0]), self._shape(node.args[1]), **node.kwargs)
        args, kwargs = map_arg((node.args, node.kwargs), self.of)
        return whole.call(node.target, *args, **kwargs)

    def _cut(self, x: Any) -> Node:
        return self._whole.call(aten.slice.Tensor, x, x.meta["val"].dim() - 1, self._start, self._end)

    def _shape(self, shape: Any) -> list[Any]:
        return [*shape[:-1], self._end - self._start]
