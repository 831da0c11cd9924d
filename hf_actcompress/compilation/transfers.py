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
    ops = offload_ops()
    for node in list(traced.graph.nodes):
        if ops is not None and node.target is _COPY and "cuda" in _devices(node):
            source, device = node.args
            with traced.graph.inserting_before(node):
                copy = ops.offload.default if torch.device(device).type == "cpu" else ops.reload.default
                moved = traced.graph.call_function(copy, (source,) if copy is ops.offload.default else (source, device))
                # the source must not be freed before the copy is complete; what waits for it reads the source
                done = traced.graph.call_function(ops.wait_tensor.default, (moved, None, source))
            with source.meta["val"].fake_mode:
                moved.meta["val"] = copy(*(arg.meta["val"] if isinstance(arg, Node) else arg for arg in moved.args))
            done.meta["val"] = moved.meta["val"]
            node.replace_all_uses_with(done)
            traced.graph.erase_node(node)
    return traced


def _devices(node: Node) -> set[str]:
    return {x.meta["val"].device.type for x in (node, *node.all_input_nodes)}
