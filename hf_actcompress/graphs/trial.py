"""A plan's code runs once on tensors without data before any training uses it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.autocast import autocast_off
from ..private_apis import FakeTensorMode
from .plan import LayerPlan
from .trace import Joint, NotTraced


def try_plan(plan: LayerPlan, joint: Joint, given: Sequence[Tensor]) -> None:
    """Run forward and backward of a plan on tensors without data.

    Their sizes are numbers, those of the inputs `given`, also if the graph is for any sizes: symbols take torch ten
    times as long.

    Raises:
        NotTraced: The code cannot run, or gives an output or a gradient of another shape or dtype than the layer does.
    """
    inside = [x for x in plan.packed if not x.outside]
    packs = ([lambda x: x] * len(inside),) if inside else ()
    mode, inputs = joint.mode, joint.inputs
    if mode.shape_env is not None:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        inputs = [mode.from_tensor(x.detach()) for x in given]
    # the layer runs it without autocast, too: the graph has the casts
    with mode, torch.no_grad(), autocast_off(given[0].device.type):
        found = plan.forward(*inputs, *packs)
        pool = (*inputs, *found[: plan.tensors])
        saved = [pool[i] for i, _ in plan.kept] + list(found[plan.tensors :])
        for x in inside:
            if x.rows is not None:
                # whatever the sizes are
                saved[x.place] = x.rows.tokens(saved[x.place], (1, -1))
            elif x.order is not None:
                saved[x.place] = saved[x.place].permute(x.order)
        run, _ = plan.backward(frozenset(), ())
        tangents = [torch.empty_like(y, dtype=dy.dtype) for y, dy in zip(found, joint.tangents, strict=False)]
        grads = run([*saved, *tangents])
    for i, (y, like) in enumerate(zip(found, joint.tangents, strict=False)):
        if not _alike(y, like):
            raise NotTraced(f"its output {i} has another shape or dtype in the graph")
    places = [*range(plan.inputs), *plan.repeats]
    for i, grad in zip(places, grads, strict=True):
        if grad is not None and not _alike(grad, joint.inputs[i]):
            raise NotTraced(f"the gradient of its input {i} has another shape or dtype than the input")


def _alike(x: Tensor, like: Tensor) -> bool:
    # sizes of `like` may be symbols, which must not be compared: that would be a guard
    return x.dtype == like.dtype and x.dim() == like.dim()
