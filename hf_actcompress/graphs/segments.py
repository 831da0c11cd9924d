"""A graph in which what lies between nodes that no compiler sees into is one call of a compiler's code."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..codecs import Codec
from ..compilation.policy import is_view
from .compiled_run import PackedInGraph, Segment, symbols_in, tensors_of
from .packing import Packed
from .retraced import is_opaque, segment_module

# compiles a function of a list of values, of which some are given without data; returns its code and what that returns
Compile = Callable[[Callable[..., list[Any]], Sequence[Any]], tuple[Any, Sequence[Any]]]


@dataclass
class Segmented:
    """A graph that is cut in segments.

    Attributes:
        graph: The new graph.
        copied: By node of the old graph: its value in the new one, as far as somebody reads it.
        values: By node of the old graph: its value, without data, as it lies in memory; else as the old graph says.
        forms: What is packed in the graph, by node of the old graph; in the new one it is a record.
        records: These records' nodes.
    """

    graph: Graph = field(default_factory=Graph)
    copied: dict[Node, Node] = field(default_factory=dict)
    values: dict[Node, Any] = field(default_factory=dict)
    forms: dict[Node, PackedInGraph] = field(default_factory=dict)
    records: dict[Node, Node] = field(default_factory=dict)


class Cutter:
    """Cuts a graph in segments.

    Args:
        owner: The module of the graph.
        nodes: Its nodes that are needed, in order.
        results: What the graph returns.
        compile: Compiles a segment.
        values: By placeholder: its value, without data, if it lies in memory in another way than the graph says.
        packs: What is packed where it is made, and its codec.
        opened: By placeholder: how it was packed; segments unpack it themselves.
        backward: Whether it is the graph of a backward.
    """

    def __init__(
        self,
        owner: GraphModule,
        nodes: Sequence[Node],
        results: Sequence[Node],
        compile: Compile,
        *,
        values: dict[Node, Any] | None = None,
        packs: dict[Node, tuple[Packed, Codec]] | None = None,
        opened: dict[Node, PackedInGraph] | None = None,
        backward: bool,
    ) -> None:
        self._owner, self._nodes, self._compile, self._backward = owner, nodes, compile, backward
        self._packs, self._opened = packs or {}, opened or {}
        self._results: set[Node] = set(results)
        self._made = Segmented(values=dict(values or {}))
        # by placeholder that segments unpack: its packed tensors, and the tensor for readers outside of segments
        self._tensors: dict[Node, list[Node]] = {}
        self._whole: dict[Node, Node] = {}

    def cut(self) -> Segmented:
        """The graph in segments."""
        made = self._made
        for node in self._nodes:
            if node.op == "placeholder":
                made.copied[node] = made.graph.placeholder(node.name)
                made.copied[node].meta = dict(node.meta)
        groups = [
            list(group) if opaque else self._with_views(list(group))
            for opaque, group in groupby(_with_items(x for x in self._nodes if x.op != "placeholder"), is_opaque)
        ]
        self._read = self._results.union(*(set(_given(group)) for group in groups))
        for group in groups:
            if is_opaque(group[-1]):
                for node in group:
                    self._copy(node)
            else:
                self._segment(group)
        return made

    def _with_views(self, nodes: list[Node]) -> list[Node]:
        """The nodes of a segment, and before them the views that it reads from other segments.

        It makes these itself, because a compiler may lay out a view that it returns in any way.
        """
        added: dict[Node, None] = {}
        pending = _given(nodes)
        while pending:
            node = pending.pop()
            if node.op == "call_function" and is_view(node) and node not in self._packs and node not in added:
                added[node] = None
                pending += node.all_input_nodes
        order = {node: i for i, node in enumerate(self._nodes)}
        return [*sorted(added, key=order.__getitem__), *nodes]

    def _copy(self, node: Node) -> None:
        """Leave a node as it is."""
        self._made.copied[node] = self._made.graph.node_copy(node, self._value)

    def _value(self, x: Node) -> Node:
        """The value of a node for a reader that is left as it is."""
        if x not in self._opened:
            return self._made.copied[x]
        if x not in self._whole:
            form = self._opened[x]
            self._whole[x] = self._made.graph.call_function(form.packed.opened, (self._made.copied[x],))
            self._whole[x].meta = dict(x.meta)
        return self._whole[x]

    def _segment(self, nodes: list[Node]) -> None:
        if not any(map(_computes, nodes)):
            for node in nodes:
                self._copy(node)
            return
        given = _given(nodes)
        packs = [node for node in nodes if node in self._packs]
        results = [node for node in nodes if node in self._read and node not in self._made.copied]
        run = segment_module(self._owner, nodes, given, results)
        tensors = [self._opened[x].tensors if x in self._opened else (self._lies(x),) for x in given]
        forms: dict[Node, PackedInGraph] = {}

        def call(*values: Any) -> list[Any]:
            left = iter(values)
            parts = [tuple(next(left) for _ in one) for one in tensors]
            run.opens = {
                x: lambda form=self._opened[x], part=part: form.unpacked(part)  # type: ignore[misc]
                for x, part in zip(given, parts, strict=True) if x in self._opened
            }  # fmt: skip
            run.made = lambda node, value: self._pack(node, value, forms)
            found = run.run(*(None if x in self._opened else part[0] for x, part in zip(given, parts, strict=True)))
            packed = [[*forms[x].tensors, *symbols_in(forms[x].meta)] for x in packs]
            return [*found, *(value for one in packed for value in one)]

        arguments = [y for x in given for y in self._arguments(x)]
        code, values = self._compile(call, [y for one in tensors for y in one])
        made = self._made.graph.call_function(Segment(code, self._backward), tuple(arguments))
        made.meta["val"] = tuple(values)
        items = iter(self._items(made, values))
        for node in results:
            self._made.copied[node] = item = next(items)
            self._made.values[node] = item.meta["val"]
        for node in packs:
            count = len(forms[node].tensors)
            own = [next(items) for _ in range(count + len(symbols_in(forms[node].meta)))]
            form = forms[node]._replace(tensors=tuple(x.meta["val"] for x in own[:count]))
            self._made.forms[node] = form
            self._made.records[node] = self._made.graph.call_function(form.stored, tuple(own))

    def _pack(self, node: Node, value: Any, forms: dict[Node, PackedInGraph]) -> None:
        if node in self._packs:
            packed, codec = self._packs[node]
            x = value if packed.order is None else value.permute(packed.order)
            forms[node] = PackedInGraph(packed, codec, *codec.pack(x))

    def _lies(self, x: Node) -> Any:
        """A value without data, as it lies in memory."""
        return self._made.values.get(x, x.meta["val"])

    def _arguments(self, x: Node) -> list[Node]:
        """What a segment is given for a value: it, or what a codec has made of it."""
        if x not in self._opened:
            return [self._made.copied[x]]
        if x not in self._tensors:
            made = self._made.graph.call_function(tensors_of, (self._made.copied[x],))
            made.meta["val"] = self._opened[x].tensors
            self._tensors[x] = list(self._items(made, self._opened[x].tensors))
        return self._tensors[x]

    def _items(self, made: Node, values: Sequence[Any]) -> Iterator[Node]:
        for i, value in enumerate(values):
            item = self._made.graph.call_function(operator.getitem, (made, i))
            item.meta["val"] = value
            yield item


def _given(nodes: Sequence[Node]) -> list[Node]:
    """What some nodes read that none of them makes."""
    inside = set(nodes)
    return list(dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in inside))


def _with_items(nodes: Iterable[Node]) -> list[Node]:
    """The nodes, and behind each what is taken out of it: a segment returns tensors, and no tuples of them."""
    ordered = list(nodes)
    items: dict[Node, list[Node]] = {}
    for node in ordered:
        if node.target is operator.getitem:
            items.setdefault(node.args[0], []).append(node)  # type: ignore[arg-type]

    def behind(node: Node) -> Iterator[Node]:
        yield node
        for item in items.get(node, ()):
            yield from behind(item)

    starts = (x for x in ordered if x.target is not operator.getitem or x.args[0].op == "placeholder")  # type: ignore[union-attr]
    return [x for start in starts for x in behind(start)]


def _computes(node: Node) -> bool:
    """Whether a node computes a tensor, and does not just show one or its sizes."""
    is_tensor = isinstance(node.meta.get("val"), (Tensor, tuple, list))
    return node.op == "call_function" and is_tensor and not is_view(node) and node.target is not operator.getitem
