"""Puts the traced graph of a codec into a graph: its nodes are copied, or, for Inductor on a CPU, it is called.

Inductor compiles a called graph once, however often it is called. Nodes that are copied it compiles for each tensor
anew. It also writes all loops between two products into one C++ function, and the codecs of several tensors in one
function make a function that no other layer shares.

Only packing is called, because what a layer keeps is in memory anyway. What is unpacked in backward is often read in
registers, and a called graph would write it to memory.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch._inductor.config as inductor
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..private_apis import graph_call, partitioner_ops
from .policy import draws_or_writes


def copied(graph: Graph, traced: GraphModule, inputs: Sequence[Node], before: Node) -> list[Node]:
    """Copy the traced graph of a function of tensors in front of the node `before`. Returns its results' nodes."""
    places = (node for node in traced.graph.nodes if node.op == "placeholder")
    known: dict[Node, Any] = dict(zip(places, inputs, strict=True))
    with graph.inserting_before(before):
        for node in traced.graph.nodes:
            if node.op == "output":
                return [known[result] for result in node.args[0]]
            if node.op != "placeholder":
                known[node] = graph.node_copy(node, lambda n: known[n])
                known[node].meta = {"val": node.meta.get("val")}
    raise AssertionError("a graph has an output")


def can_call(traced: GraphModule) -> bool:
    """Whether Inductor can compile a call of that graph, and saves time by it."""
    if inductor.cpp_wrapper or graph_call() is None:
        # code in C++ alone has no calls
        return False
    for node in traced.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and not (isinstance(value, Tensor) and _is_fixed_on_cpu(value)):
            return False
        if node.op == "call_function" and draws_or_writes(node):
            # Inductor's form of random numbers is only made in the graph that calls
            return False
    return True


def _is_fixed_on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and all(type(size) is int for size in (*x.shape, *x.stride()))


def behind_product(x: Node) -> Node | None:
    """The node behind the first product after x, where a C++ function ends anyway; None if there is no product."""
    dear, node = partitioner_ops().compute_intensive_ops, x.next
    while node.op != "output":
        if getattr(node.target, "overloadpacket", None) in dear:
            return node.next
        node = node.next
    return None


def called(graph: Graph, traced: GraphModule, inputs: Sequence[Node], before: Node) -> list[Node]:
    """Call the traced graph in front of the node `before`. Returns its results' nodes."""
    owner = graph.owning_module
    assert owner is not None
    name = next((name for name, child in owner.named_children() if child is traced), "")
    if not name:
        name = f"actcompress_{len(list(owner.children()))}"
        setattr(owner, name, traced)
    output = next(node for node in reversed(traced.graph.nodes) if node.op == "output")
    values = [result.meta["val"] for result in output.args[0]]  # type: ignore[union-attr]
    with graph.inserting_before(before):
        call = graph.call_function(graph_call(), (graph.get_attr(name), name, *inputs))
        call.meta["val"] = tuple(values)
        results = [graph.call_function(operator.getitem, (call, i)) for i in range(len(values))]
    for result, value in zip(results, values, strict=True):
        result.meta["val"] = value
    return results
