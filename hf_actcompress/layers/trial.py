"""A plan's code runs once on tensors without data before any training uses it."""

from __future__ import annotations

import torch

from .plan import LayerPlan
from .trace import Joint, NotTraced


def try_plan(plan: LayerPlan, joint: Joint) -> None:
    """Run forward and backward of a plan on the tensors without data with which its graph was traced.

    Raises:
        NotTraced: The code cannot run, or gives a gradient of another shape or dtype than its input has.
    """
    inside = [x for x in plan.packed if not x.outside]
    packs = ([lambda x: x] * len(inside),) if inside else ()
    with joint.mode, torch.no_grad():
        found = plan.forward(*joint.inputs, *packs)
        pool = (*joint.inputs, *found[: plan.tensors])
        saved = [pool[i] for i, _ in plan.kept] + list(found[plan.tensors :])
        for x in inside:
            if x.order is not None:
                saved[x.place] = saved[x.place].permute(x.order)
        run, _ = plan.backward(frozenset(), ())
        grads = run([*saved, *joint.tangents])
    places = [*range(plan.inputs), *plan.repeats]
    for i, grad in zip(places, grads, strict=True):
        like = joint.inputs[i]
        if grad is not None and (grad.dtype != like.dtype or grad.dim() != like.dim()):
            raise NotTraced(f"the gradient of its input {i} has another shape or dtype than the input")
