"""Views that code of one call after the other can do without: each costs the host as much as a small kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten
_VIEW = aten.view.default
# views that begin where the tensor begins
_WHOLE = {_VIEW, aten.expand.default, aten.permute.default, aten.transpose.int}


def fewer_views(graph: Graph) -> None:
    """Let sums have the shape that is read, let pointwise calls between two views run without them, and let no view be
    of the shape and order that its tensor has.

    The graph is changed in place; no number changes.
    """
    for node in list(graph.nodes):
        if node.target in _WHOLE and _changes_nothing(node):
            node.replace_all_uses_with(node.args[0])
        elif node.target is _VIEW:
            _sum_as_read(graph, node)
        elif torch.Tag.pointwise in getattr(node.target, "tags", ()):
            _as_read(graph, node)
    graph.eliminate_dead_code()


def _changes_nothing(view: Node) -> bool:
    x: Any = view.args[0]
    # it may have been erased since
    if x is None or any(reader.op == "output" for reader in view.users):
        return False
    seen, given = view.meta["val"], x.meta["val"]
    return str((seen.shape, seen.stride())) == str((given.shape, given.stride()))


def _sum_as_read(graph: Graph, view: Node) -> None:
    """``sum(x, dims, keepdim=True).view(...)``, which is how autograd writes the gradient of a bias."""
    total: Any = view.args[0]
    # the view may have been erased since
    if total is None or total.target is not aten.sum.dim_IntList or len(total.users) > 1 or len(total.args) < 3:
        return
    x, dims = total.args[:2]
    shape = x.meta["val"].shape
    summed = {dim % len(shape) for dim in dims}
    left = [size for dim, size in enumerate(shape) if dim not in summed]
    if str(left) != str([*view.meta["val"].shape]):
        return
    with graph.inserting_before(total):
        new = graph.call_function(total.target, (x, dims), total.kwargs)
    new.meta = dict(view.meta)
    view.replace_all_uses_with(new)
    graph.erase_node(view)
    graph.erase_node(total)


def _as_read(graph: Graph, node: Node) -> None:
    """A pointwise call whose arguments are views of tensors of one shape, and whose result is read in that shape."""
    readers, given = list(node.users), node.all_input_nodes
    if not readers or not given or any(reader.target is not _VIEW for reader in readers):
        return
    wanted = readers[0].meta["val"]
    if any(_shape(reader) != str(wanted.shape) for reader in readers) or wanted.dtype != node.meta["val"].dtype:
        return
    if not all(_is_view_of(x, node, wanted) for x in given):
        return
    with graph.inserting_before(node):
        new = graph.node_copy(node, lambda x: x.args[0])  # type: ignore[return-value, arg-type]
    new.meta = {**node.meta, "val": wanted}
    for reader in readers:
        reader.replace_all_uses_with(new)
        graph.erase_node(reader)
    graph.erase_node(node)


def _is_view_of(x: Node, node: Node, wanted: Any) -> bool:
    """Whether x is a view, in the shape of the call's result, of a tensor that has the wanted shape."""
    source = x.args[0] if x.target is _VIEW else None
    if not isinstance(source, Node) or _shape(x) != _shape(node) or _shape(source) != str(wanted.shape):
        return False
    # in another order in memory, the result would be in that order, too
    return bool(source.meta["val"].is_contiguous())


def _shape(node: Node) -> str:
    return str(node.meta["val"].shape)
