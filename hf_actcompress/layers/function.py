"""The autograd Function that runs a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..graphs.keeping import Outside, put_together, taken_apart
from ..graphs.plan import LayerPlan
from ..graphs.rows import Checks, LeftOut
from ..ops import layer_calls
from ..ops.autocast import autocast_off
from ..ops.first_order import once_differentiable
from ..private_apis import bare_apply, below_autograd
from ..records import Record, current, record_of, rows_in_force
from .handing import Heads, no_views, with_heads
from .stages import Stages, no_gradients, run_backward, stages_of


class Way(NamedTuple):
    """How one layer runs its plan, and keeps what it keeps.

    Attributes:
        forward, backward: The plan's code, or what a compiler has made of it.
        packs: The list of functions that pack what the plan has made, or nothing.
        outside: The kept inputs, each with its codec.
        compiled: Whether a compiler has made the code.
    """

    forward: Callable[..., Sequence[Any]]
    backward: Callable[..., tuple[Callable[..., Any], tuple[int, ...]]]
    packs: tuple[list[Callable[[Tensor], Record]], ...]
    outside: list[Outside]
    compiled: bool = False


def _without_rows(left_out: LeftOut, way: Way, kept: list[Any], inputs: Sequence[Tensor]) -> Checks | None:
    """Let kept inputs have records without the rows that are left out. Returns what backward checks."""
    for place, codec in way.outside:
        # what is recomputed from them has their rows, too
        record_of(kept[place], codec)
    return left_out.checks(rows_in_force(), inputs)


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
        with below_autograd(), autocast_off(device.type), layer_calls.running(calls):
            found = way.forward(*inputs[: plan.inputs], *way.packs)
        outputs = no_views(found[: plan.outputs])
        if plan.extra.written:
            plan.extra.write(outputs, inputs)
        pool = (*inputs[: plan.inputs], *outputs, *found[plan.outputs : plan.tensors])
        # keep a weight's data of now, as stock's views do: a later `param.data = ...` changes only the parameter
        kept: list[Any] = [pool[i].detach() if w else pool[i] for i, w in plan.kept]
        ctx.checks = None if plan.left_out is None else _without_rows(plan.left_out, way, kept, inputs)
        for made in plan.made:
            made.declare(outputs[made.output], kept, found[plan.tensors :], sharded)
        keepers: Sequence[str] = plan.keepers
        ctx.slots = None
        if way.outside or plan.packed or calls:
            kept, ctx.slots, keepers = taken_apart(kept, way.outside, keepers, plan.left_out is not None)
        if current.watcher is not None:
            current.watcher.keeps(kept, keepers, checkpointed=plan.checkpointed)
        ctx.save_for_backward(*kept)
        ctx.sizes = found[plan.tensors :]
        ctx.plan, ctx.backward_of, ctx.stages, ctx.heads = plan, way.backward, stages, heads
        ctx.calls = calls if plan.calls_again else ()
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
        if ctx.checks is not None:
            ctx.checks.look(grads)
        saved = list(ctx.saved_tensors)
        if ctx.slots:
            saved = put_together(saved, ctx.slots, len(plan.kept))
        missing = plan.missing(grads)
        # `with_heads` gives them in reverse order
        handed = with_heads(grads, ctx.heads, range(plan.outputs))[::-1]
        stages = stages_of(ctx)
        run, zeros = ctx.backward_of(missing, () if stages is None else stages.stops)
        for i in zeros:
            shape, dtype, device = ctx.like[i]
            handed[i] = torch.zeros(shape, dtype=dtype, device=device)
        # the code frees each saved tensor as soon as it can, unless the graph is retained for another backward
        ctx.maybe_clear_saved_tensors()
        saved += ctx.sizes
        saved += [x if x is None or x.is_contiguous() else x.contiguous() for x in handed]
        handed.clear()
        with layer_calls.running(ctx.calls):
            found = run_backward(run, stages, saved)
        return (None, None, None, None, None, None, None, *found)
