"""A traced graph without what a trace leaves in it: copies, examples of shapes, and sizes that it computes twice."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

aten = torch.ops.aten
# nodes that are the same tensor as their input
_SAME = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default}


def name_placeholders(graph: Graph, inputs: int) -> None:
    """Name them as torch's partitioner asks for."""
    for i, node in enumerate([node for node in graph.nodes if node.op == "placeholder"]):
        node.target = f"primals_{i + 1}" if i < inputs else f"tangents_{i - inputs + 1}"
        node.name = node.target


def without_copies(graph: Graph) -> None:
    """Let all that read a copy, or another name of a tensor, read the tensor itself. What has to be kept is the tensor:
    torch 2.14 and newer write other names of it than older ones.
    """
    for node in list(graph.nodes):
        if node.target in _SAME:
            if "recompute" in node.meta:
                node.args[0].meta["recompute"] = node.meta["recompute"]
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def without_examples(graph: Graph) -> None:
    """Replace `x.new_empty(size)` by `torch.empty(size)`, so that x need not be kept for it."""
    for node in list(graph.nodes):
        if node.target is aten.new_empty.default:
            value = node.meta["val"]
            node.target, node.args = aten.empty.memory_format, node.args[1:]
            node.kwargs = {"dtype": value.dtype, "device": value.device}


def once_each_size(graph: Graph) -> None:
    """Let each size be computed once: in a graph for any sizes, several tensors have the same one. A size that later
    code has turned out to need, such as the width, is a number.
    """
    first: dict[str, Node] = {}
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.SymInt):
            size = value.node.expr
            same: Any = int(size) if size.is_number else first.setdefault(str(size), node)
            if same is not node:
                _replace(node, same)
                graph.erase_node(node)


def _replace(node: Node, by: Any) -> None:
    """Let all that read a node read another one, or a number."""
    for user in list(node.users):
        user.args, user.kwargs = map_arg((user.args, user.kwargs), lambda x: by if x is node else x)
