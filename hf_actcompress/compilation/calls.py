"""Puts a traced graph into a graph: its nodes are copied, or, for Inductor on a CPU, it is called.

Inductor compiles a called graph once, however often it is called. Nodes that are copied it compiles for each tensor
anew. It also writes all loops between two products into one C++ function, and the codecs of several tensors in one
function make a function that no other layer shares.

The calls are placed between these functions, so that they split none.

Of codecs, only packing is called, because what a layer keeps is in memory anyway. What is unpacked in backward is often
read in registers, and a called graph would write it to memory.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch._inductor.config as inductor
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..private_apis import graph_call, partitioner_ops, written_op
from .policy import draws_or_writes, is_attention, made_by

# the kind of device that graphs are made for; None: that of their tensors
_device: ContextVar[str | None] = ContextVar("device of compiled graphs", default=None)


@contextmanager
def graphs_for(device: str) -> Iterator[None]:
    """While the block runs, graphs are made for that kind of device, whatever device an estimate's tensors are on."""
    token = _device.set(device)
    try:
        yield
    finally:
        _device.reset(token)


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
    return (_device.get() or x.device.type) == "cpu" and all(type(size) is int for size in (*x.shape, *x.stride()))


def between_functions(x: Node) -> Node | None:
    """The first node after x in front of which a call splits no C++ function; None if there is none.

    Inductor ends a C++ function in front of a product. The place is in front of the first product that reads x or comes
    after another reader of x, because what is made from x belongs to the same function as x. In front of attention
    Inductor still copies what attention reads, so there the place is behind it.
    """
    views, read, node = {x}, False, x.next
    while node.op != "output":
        reads = not views.isdisjoint(node.all_input_nodes)
        if reads and made_by(node) is made_by(x):
            views.add(node)
        else:
            read = read or reads
            if read and _ends_function(node):
                return node.next if is_attention(node) else node
        node = node.next
    return None


def _ends_function(node: Node) -> bool:
    """Whether it is a product, a convolution or attention: Inductor calls them between its functions."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return packet in partitioner_ops().compute_intensive_ops or is_attention(node)


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


def in_memory(graph: Graph, x: Node) -> Node:
    """Let Inductor write x to memory before it compiles x's readers; otherwise each of them computes x for itself."""
    base = made_by(x)
    if _ends_function(base) or base.op != "call_function" or base.target is operator.getitem:
        return x
    with graph.inserting_after(base):
        written = graph.call_function(written_op(), (base, base.meta["val"].stride()))
    written.meta["val"] = base.meta["val"]
    base.replace_all_uses_with(written, delete_user_cb=lambda user: user is not written)
    return written if x is base else x
