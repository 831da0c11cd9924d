"""Divides a joint graph into the graphs of forward and backward, by the marks of patched modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from ..private_apis import min_cut_partition, replace_random
from .logits import divide_logits, take_out_padding
from .ordering import order_weights
from .packing import pack_saved
from .policy import apply_policy, has_marks
from .seeds import divide_seeds


def partition(
    joint: GraphModule, inputs: Sequence[object], *, inner: Any = None, num_fwd_outputs: int, **kwargs: Any
) -> tuple[GraphModule, GraphModule]:
    """Divide a joint graph.

    Args:
        joint: The graph that AOTAutograd traced: its outputs are the forward's, then the gradients of its inputs.
        inputs: The values with which it was traced.
        inner: The function that divides once every node has been tagged; None: torch's search for the smallest cut.
        num_fwd_outputs: How many outputs are the forward's.

    Returns:
        The graph of the forward and the graph of the backward.
    """
    divide = inner or min_cut_partition
    marked, inductor = has_marks(joint.graph), kwargs.get("compiler") == "inductor"
    if marked:
        apply_policy(joint.graph, num_fwd_outputs)
    forward, backward = divide(joint, inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)
    if marked:
        if inductor:
            take_out_padding(backward.graph)
            order_weights(backward.graph)
            divide_logits(backward.graph)
        pack_saved(forward, backward, num_fwd_outputs, calls=inductor)
        if inductor:
            # Inductor wants the random numbers that a codec draws in its own form
            replace_random(forward)
            divide_seeds(forward.graph)
        for module in (forward, backward):
            module.graph.lint()
            module.recompile()
    return forward, backward
