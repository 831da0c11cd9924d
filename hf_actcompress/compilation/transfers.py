"""Copies between a device and host memory in the traced graph of a codec that offloads.

The trace has them as plain copies, for which a CUDA device and the host wait, through memory that is not pinned. Where
torch has ops of its own for the activations of compiled graphs, they take their place: these use pinned memory and a
stream beside that of the computation.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ..private_apis import offload_ops

_COPY = torch.ops.prims.device_put.default


def with_transfers(traced: GraphModule) -> GraphModule:
    """The graph with torch's ops in place of copies from a CUDA device to the host and back."""
    ops, graph = offload_ops(), traced.graph
    if ops is None:
        return traced
    for node in [node for node in graph.nodes if node.target is _COPY and "cuda" in _devices(node)]:
        source, device = node.args
        value, to_host = source.meta["val"], torch.device(device).type == "cpu"
        copy, *options = (ops.offload.default,) if to_host else (ops.reload.default, device)
        with graph.inserting_before(node), value.fake_mode:
            moved = graph.call_function(copy, (source, *options))
            # the op that waits also reads the source: so the source is not freed before the copy is complete
            done = graph.call_function(ops.wait_tensor.default, (moved, None, source))
            moved.meta["val"] = done.meta["val"] = copy(value, *options)
        node.replace_all_uses_with(done)
        graph.erase_node(node)
    return traced


def _devices(node: Node) -> set[str]:
    return {x.meta["val"].device.type for x in (node, *node.all_input_nodes)}
