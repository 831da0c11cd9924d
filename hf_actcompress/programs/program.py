"""A program: steps over numbered values, run by one autograd Function.

The steps are written down as straight-line code (`emit`), once for each setting in which the program is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from ..codecs import Codec
from ..ops.first_order import once_differentiable
from ..private_apis import bare_apply
from ..records import applied, current, saved_next
from ..reference.device_rules import device_rules
from . import stages
from .checkpoint import CheckpointedFunction, CheckpointPlan, make_checkpoint_plan
from .computation import Computation
from .emit import ESTIMATED, ESTIMATED_CPU, CallSetting
from .handing import Heads, no_views, with_heads
from .keeping import know_outside, put_together, taken_apart
from .left_out import LeftOut
from .partial_gradients import PartialGradients
from .plan import ProgramPlan, make_plan
from .stages import Stages, Stops, no_gradients, run_backward, running, stages_of, stops_of


@dataclass
class Program(Computation):
    """A computation that runs. Layers that do the same share their programs.

    Attributes:
        plans: The plan of each setting in which it was called.
        checkpoint_plans: The same for calls that backward recomputes.
    """

    plans: dict[Any, ProgramPlan] = field(default_factory=dict)
    checkpoint_plans: dict[Any, CheckpointPlan] = field(default_factory=dict)

    def __call__(
        self,
        inputs: Sequence[Tensor | None],
        autocast: torch.dtype | None,
        sharded: bool,
        heads: Heads | None = None,
        kernel: str | None = None,
        left_out: LeftOut | None = None,
        checkpointed: Codec | None = None,
    ) -> Any:
        """Run it and return a tuple of the outputs.

        Args:
            inputs: The first is an activation.
            autocast: The dtype of products under autocast; None while it is off.
            sharded: Whether the weights' memory is freed when the layer has run.
            heads: Where `HeadsHanded` leaves gradients of outputs for it; None: autograd hands in all of them.
            kernel: The kernel of its attention, if it has one.
            left_out: The rows of which nothing is kept; None if all are kept.
            checkpointed: Through which codec the first input is kept, if backward recomputes all else from the inputs.
        """
        stops = self._stops(inputs)
        key = _key(inputs, autocast, stops, kernel, left_out is not None and checkpointed is None)
        run = Stages(stops, inputs) if stops else None
        link = None if run is None else run.linked(inputs)
        if checkpointed is not None:
            again = self.checkpoint_plans.get(key)
            if again is None:
                again = self.checkpoint_plans[key] = make_checkpoint_plan(self, CallSetting(*key))
            weights = len(self.weights)
            return applied(CheckpointedFunction, again, run, heads, weights, checkpointed, left_out, link, *inputs)
        plan = self.plans.get(key)
        if plan is None:
            plan = self.plans[key] = make_plan(self, CallSetting(*key))
        return applied(ProgramFunction, plan, sharded, run, heads, left_out, link, *inputs)

    def _stops(self, inputs: Sequence[Tensor | None]) -> Stops:
        """Where a backward stops, so that autograd accumulates the gradients of some weights before it goes on."""
        if self.elements <= stages.SLACK:
            return ()
        x = inputs[0]
        assert x is not None
        return stops_of(self.order, inputs, 4 * x.numel())

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        return self

    def __reduce__(self) -> Any:
        return Program, (self.steps, self.metas, self.weights, self.outputs, self.optional, self.layouts, self.lossless)


def _key(
    inputs: Sequence[Tensor | None], autocast: torch.dtype | None, stops: Stops, kernel: str | None, fewer: bool = False
) -> tuple[Any, ...]:
    """What decides how a program runs: the fields of a `CallSetting`."""
    x = inputs[0]
    assert x is not None
    dtypes = tuple([None if x is None else x.dtype for x in inputs])
    needed = tuple([x is not None and x.requires_grad for x in inputs])
    rules = device_rules()
    choice = dispatch.chosen() if rules is None else ESTIMATED_CPU if rules.on_cpu else ESTIMATED
    return x.device, autocast, choice, dtypes, needed, stops, kernel, fewer


class ProgramFunction(torch.autograd.Function):
    """Keeps what the plan says, weights by reference."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        return bare_apply(cls, *args)

    @staticmethod
    def forward(
        ctx: Any,
        plan: ProgramPlan,
        sharded: bool,
        stages: Stages | None,
        heads: Heads | None,
        left_out: LeftOut | None,
        link: Tensor | None,
        *inputs: Tensor | None,
    ) -> Any:
        x = inputs[0]
        assert x is not None
        picks = () if left_out is None else (left_out.picked(x.device),)
        with running(plan.differentiates):
            found = plan.forward(*inputs, *picks)
        outputs = no_views(found[: plan.outputs])
        found = (*outputs, *found[plan.outputs :])
        pool = (*inputs, *found)
        # keep a weight's data of now, as stock's views do: a later `param.data = ...` changes only the parameter
        kept: list[Any] = [pool[i].detach() if w else pool[i] for i, w in zip(plan.kept, plan.weights, strict=True)]
        if left_out is not None:
            know_outside(kept, plan.outside)
        for rebuilt in plan.rebuilt:
            rebuilt.declare(outputs[rebuilt.output], pool, kept, sharded, left_out)
        keepers: Sequence[str] = plan.keepers
        ctx.slots = ctx.left = None
        if plan.outside or plan.packs or left_out is not None:
            kept, ctx.slots, keepers, ctx.left = taken_apart(kept, plan.outside, keepers, x.device, left_out)
        if current.watcher is not None:
            current.watcher.keeps(kept, keepers)
        saved_next(kept, [x.place for x in plan.outside])
        ctx.save_for_backward(*kept)
        ctx.plan, ctx.stages, ctx.heads = plan, stages, heads
        ctx.partial = PartialGradients.of(ctx, plan, outputs)
        if len(plan.graded) < plan.outputs:
            ctx.mark_non_differentiable(*(y for i, y in enumerate(outputs) if i not in plan.graded))
        return outputs

    @staticmethod
    @partial(once_differentiable, always=True)
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if all([dy is None for dy in grads]):
            return no_gradients(ctx, ctx.stages)
        plan, saved = ctx.plan, list(ctx.saved_tensors)
        without: frozenset[int] = frozenset()
        if ctx.partial is not None:
            grads, without = ctx.partial.completed(plan, grads)
        handed = with_heads(grads, ctx.heads, plan.graded)
        if ctx.left is not None:
            ctx.left.check(saved, handed, plan.layouts)
            handed.append(ctx.left.spread(saved))
        if ctx.slots or ctx.left is not None:
            saved = put_together(saved, ctx.slots, len(plan.kept))
        # the code frees each saved tensor as soon as it can, unless the graph is retained for another backward
        ctx.maybe_clear_saved_tensors()
        saved.reverse()
        saved.extend(handed)
        handed.clear()
        found = run_backward(plan.backward, plan.differentiates, stages_of(ctx), saved, without)
        return (None, None, None, None, None, None, *found)
