"""A checkpointed layer as one autograd Function: it keeps its input, and recomputes the rest inside of its backward.

There is no second autograd graph, and a product whose result no backward reads is not recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..codecs import Codec
from ..models.checkpointing import checkpoint_without_cache
from ..ops.first_order import once_differentiable
from ..private_apis import bare_apply
from ..records import current, saved_next
from ..reference import replayed_rng, rng_state
from .computation import Computation
from .emit import CallSetting
from .handing import Heads, no_views, with_heads
from .keeping import Outside, opened, put_together, taken_apart
from .left_out import LeftOut
from .partial_gradients import PartialGradients
from .plan import ProgramPlan, assembled, both_ways, forward_of, writing
from .stages import Stages, no_gradients, run_backward, running, stages_of

# the options that a plain checkpoint may have
_PLAIN = {"use_reentrant": False, "preserve_rng_state": True}


def is_plain(function: Any) -> bool:
    """Whether a function is torch's non-reentrant checkpoint with its default options."""
    # an estimate puts a stand-in in its place
    function = getattr(function, "stands_for", function)
    if (
        not isinstance(function, partial)
        or function.args
        or function.func not in (checkpoint, checkpoint_without_cache)
    ):
        return False
    told = function.keywords
    return told.get("use_reentrant") is False and all(_PLAIN.get(name) is value for name, value in told.items())


@dataclass(frozen=True)
class CheckpointPlan:
    """How a program runs whose forward is recomputed in backward.

    Attributes:
        first: Takes the inputs and returns the outputs, in one tuple.
        again: Takes the inputs and returns the values that `plan` keeps, in its order.
        plan: The plan of the program, for its backward.
        draws: Whether random numbers are drawn.
    """

    first: Callable[..., tuple[Any, ...]]
    again: Callable[..., tuple[Any, ...]]
    plan: ProgramPlan
    draws: bool


def make_checkpoint_plan(program: Computation, setting: CallSetting) -> CheckpointPlan:
    """Write the code of a program that is made again in backward."""
    with writing(setting):
        forward, backward = both_ways(program, setting)
        first, again = forward_of(program, setting), forward_of(program, setting, repeated=True)
        for value, narrow in backward.casts.items():
            again.values[narrow] = again.cast(again.values[value], forward.dtype(forward.values[narrow]))
        return CheckpointPlan(
            first.code([first.values[value] for value in program.outputs]),
            again.code([again.values[value] for value in backward.kept]),
            assembled(program, forward, backward),
            any(step.operation.draws for step in program.steps),
        )


class CheckpointedFunction(torch.autograd.Function):
    """Keeps its inputs: the first one, an activation, through a codec; weights by reference."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        return bare_apply(cls, *args)

    @staticmethod
    def forward(
        ctx: Any,
        made: CheckpointPlan,
        stages: Stages | None,
        heads: Heads | None,
        weights: int,
        codec: Codec,
        left_out: LeftOut | None,
        link: Tensor | None,
        *inputs: Tensor | None,
    ) -> Any:
        count = len(inputs) - weights
        x = inputs[0]
        assert x is not None
        state = rng_state(x.device) if made.draws else None
        with running(made.plan.differentiates):
            outputs = no_views(made.first(*inputs))
        # keep the weights' data of now: a later `param.data = ...` changes only the parameter
        values = [*inputs[:count], *(None if w is None else w.detach() for w in inputs[count:]), state]
        outside = [Outside(0, codec, fewer=True)]
        kept, ctx.slots, keepers, ctx.left = taken_apart(values, outside, [""] * len(values), x.device, left_out)
        if current.watcher is not None:
            current.watcher.keeps(kept, keepers, checkpointed=True)
        saved_next(kept, range(count))
        ctx.save_for_backward(*kept)
        ctx.count = len(values)
        ctx.made, ctx.stages, ctx.heads = made, stages, heads
        ctx.partial = PartialGradients.of(ctx, made.plan, outputs)
        return outputs

    @staticmethod
    @partial(once_differentiable, always=True)
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if all([dy is None for dy in grads]):
            return no_gradients(ctx, ctx.stages)
        plan: ProgramPlan = ctx.made.plan
        saved = list(ctx.saved_tensors)
        without: frozenset[int] = frozenset()
        if ctx.partial is not None:
            grads, without = ctx.partial.completed(plan, grads)
        handed = with_heads(grads, ctx.heads, plan.graded)
        if ctx.left is not None:
            ctx.left.check(saved, handed, plan.layouts)
        *inputs, state = put_together(saved, ctx.slots, ctx.count)
        inputs[0] = opened(inputs[0])
        drawn = nullcontext() if state is None else replayed_rng(state, inputs[0].device)
        with drawn, running(plan.differentiates):
            values = list(ctx.made.again(*inputs))
        inputs.clear()
        # the code frees each value as soon as it can
        values.reverse()
        values.extend(handed)
        handed.clear()
        found = run_backward(plan.backward, plan.differentiates, stages_of(ctx), values, without)
        return (None, None, None, None, None, None, None, *found)
