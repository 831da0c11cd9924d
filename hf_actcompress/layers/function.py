"""The autograd Function that runs a plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import opaque
from ..ops.autocast import autocast_off
from ..ops.first_order import once_differentiable
from ..private_apis import bare_apply, below_autograd
from ..records import current, saved_next
from .handing import Heads, no_views, with_heads
from .keeping import Outside, put_together, taken_apart
from .packing import Packer
from .plan import LayerPlan
from .stages import Stages, no_gradients, run_backward, stages_of


class Way(NamedTuple):
    """How one layer keeps what its plan keeps.

    Attributes:
        packs: The list of functions that pack what the plan has made, or nothing.
        outside: The kept inputs, each with its codec.
    """

    packs: tuple[list[Packer], ...]
    outside: list[Outside]


class PlanFunction(torch.autograd.Function):
    """Keeps what the plan says. Weights and inputs are kept by reference, so that autograd sees who writes on them."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        return bare_apply(cls, *args)

    @staticmethod
    def forward(
        ctx: Any,
        plan: LayerPlan,
        stages: Stages | None,
        heads: Heads | None,
        link: Tensor | None,
        sharded: bool,
        way: Way,
        calls: Sequence[Any],
        *inputs: Tensor,
    ) -> Any:
        device = inputs[0].device
        with below_autograd(), autocast_off(device.type), opaque.running(calls):
            found = plan.forward(*inputs[: plan.inputs], *way.packs)
        outputs = no_views(found[: plan.outputs])
        pool = (*inputs[: plan.inputs], *outputs, *found[plan.outputs : plan.tensors])
        # keep a weight's data of now, as stock's views do: a later `param.data = ...` changes only the parameter
        kept: list[Any] = [pool[i].detach() if w else pool[i] for i, w in plan.kept]
        for made in plan.made:
            made.declare(outputs[made.output], kept, sharded)
        keepers: Sequence[str] = plan.keepers
        ctx.slots = None
        if way.outside or plan.packed or calls:
            kept, ctx.slots, keepers = taken_apart(kept, way.outside, keepers)
        if current.watcher is not None:
            current.watcher.keeps(kept, keepers, checkpointed=plan.checkpointed)
        saved_next(kept, plan.places_outside)
        ctx.save_for_backward(*kept)
        ctx.sizes = found[plan.tensors :]
        ctx.plan, ctx.stages, ctx.heads = plan, stages, heads
        # only what runs again calls them in backward
        ctx.calls = calls if plan.checkpointed else ()
        ctx.like = [(y.shape, y.dtype, y.device) for y in outputs] if len(outputs) > 1 else ()
        ctx.set_materialize_grads(False)
        if plan.ungraded:
            ctx.mark_non_differentiable(*(outputs[i] for i in plan.ungraded))
        return outputs

    @staticmethod
    @partial(once_differentiable, always=True)
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if all([dy is None for dy in grads]):
            return no_gradients(ctx, ctx.stages)
        plan: LayerPlan = ctx.plan
        saved = list(ctx.saved_tensors)
        if ctx.slots:
            saved = put_together(saved, ctx.slots, len(plan.kept))
        missing = plan.missing(grads)
        # `with_heads` gives them in reverse order
        handed = with_heads(grads, ctx.heads, range(plan.outputs))[::-1]
        stages = stages_of(ctx)
        run, zeros = plan.backward(missing, () if stages is None else stages.stops)
        for i in zeros:
            shape, dtype, device = ctx.like[i]
            handed[i] = torch.zeros(shape, dtype=dtype, device=device)
        # the code frees each saved tensor as soon as it can, unless the graph is retained for another backward
        ctx.maybe_clear_saved_tensors()
        saved += ctx.sizes
        saved += [x if x is None or x.is_contiguous() else x.contiguous() for x in handed]
        handed.clear()
        with opaque.running(ctx.calls):
            found = run_backward(run, stages, saved)
        return (None, None, None, None, None, None, None, *found)
