"""A joint graph into the graph of its forward and that of its backward, by the marks of patched modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from ..private_apis import min_cut_partition, replace_random
from .breaks import warn_of_break
from .logits import divide_logits
from .ordering import order_weights
from .packing import pack_saved
from .policy import apply_policy, has_marks


def partition(
    joint: GraphModule, inputs: Sequence[object], *, inner: Any = None, num_fwd_outputs: int, **kwargs: Any
) -> tuple[GraphModule, GraphModule]:
    """The graphs of forward and backward.

    Args:
        joint: What AOTAutograd traced: outputs of the forward, then gradients of its inputs.
        inputs: What it was traced with.
        inner: Who partitions once every node has been told what to do; None: torch's search for the smallest cut.
        num_fwd_outputs: How many outputs are the forward's.
    """
    divide = inner or min_cut_partition
    marked = has_marks(joint.graph)
    if marked:
        warn_of_break()
        apply_policy(joint.graph, num_fwd_outputs)
    forward, backward = divide(joint, inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)
    if marked:
        if kwargs.get("compiler") == "inductor":
            order_weights(backward.graph)
            divide_logits(backward.graph)
            backward.recompile()
        pack_saved(forward, backward, num_fwd_outputs)
        if kwargs.get("compiler") == "inductor":
            # what a codec draws, as Inductor wants it
            replace_random(forward)
    return forward, backward
