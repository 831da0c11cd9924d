"""The backward of a plan in stages, between which autograd's engine adds up the gradients of weights.

A Function returns all of its gradients at once, so a plan would hold those of all its weights at once. In a first
backward the gradients stay as `weight.grad` anyway, and nothing is lost. In a later backward of an accumulation, or
where a hook uses up each gradient as soon as it is there (an optimizer inside of the backward), stock holds one at a
time. There the code of the backward is a generator, which stops where the gradients of some weights are done. The
engine runs the plan's own node up to the first stop, accumulates the gradients that it returned, and goes on with
the node of the next stage: a `Stage`, which is linked in front of the plan's own node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..ops import layer_calls
from ..ops.autocast import autocast_off
from ..ops.first_order import once_differentiable
from ..private_apis import accumulation_hooks, bare_apply, below_autograd

# elements of gradients that a plan may hold at once in any case: 4 MiB of fp32
SLACK = 2**20
# for each stage but the last one, the inputs whose gradients it returns, by place
Stops = tuple[tuple[int, ...], ...]


def stops_of(order: Sequence[tuple[int, ...]], inputs: Sequence[Tensor | None], allowed: int) -> Stops:
    """Where a backward stops, so that it holds little more at once than stock, which holds the largest gradient alone.

    Args:
        order: The weights whose gradients are done together, by place among the inputs; those that come first first.
        inputs: The inputs of the plan.
        allowed: How many elements of gradients it may hold in any case; `SLACK` at least.
    """
    sizes = [[_waiting(inputs[place]) for place in together] for together in order]
    allowed = max(SLACK, allowed)
    if sum(map(sum, sizes)) <= allowed:
        return ()
    allowed = max(allowed, *map(max, sizes))
    stages: list[tuple[int, ...]] = [()]
    held = 0
    for together, more in zip(order, map(sum, sizes), strict=True):
        if held and held + more > allowed:
            stages.append(())
            held = 0
        stages[-1] += together
        held += more
    return tuple(stages[:-1])


def _waiting(weight: Tensor | None) -> int:
    """The elements of a weight's gradient that is freed at once, as it is accumulated or a hook uses it up; or 0."""
    if weight is None or not weight.requires_grad or not (weight.grad is not None or accumulation_hooks(weight)):
        return 0
    return weight.numel()


class Stages:
    """One call of a plan whose backward has several stages.

    Args:
        stops: Where the backward stops.
        inputs: The inputs of the plan.
        calls: What its code calls that no tracer sees into.
    """

    def __init__(self, stops: Stops, inputs: Sequence[Tensor | None], calls: Sequence[Any] = ()) -> None:
        self.stops, self._calls = stops, calls
        last = {*range(len(inputs))}.difference(*stops)
        self._places = (*stops, tuple(sorted(last)))
        self._count = len(inputs)
        self._device = next(x.device.type for x in inputs if x is not None)
        self._code: Any = None
        self._box: list[Tensor | None] = []
        # whether the backward that runs has nothing to do
        self._idle = False

    def linked(self, inputs: Sequence[Tensor | None]) -> Tensor | None:
        """An empty input for the plan's own node, which links the nodes of the further stages to run after it.

        It is not stored here: its nodes hold this object, and that would be a reference cycle.
        """
        link: Tensor | None = None
        for places in reversed(self._places[1:]):
            link = bare_apply(Stage, self, places, link, *(inputs[i] for i in places))
        return link

    def begin(self, backward: Callable[..., Any], saved: list[Any]) -> tuple[Tensor | None, ...]:
        """Start the backward: the gradients of all inputs, with None for those that are not of the first stage."""
        self._box, self._idle = [], False
        self._code = backward(saved, self._box)
        found: list[Tensor | None] = [None] * self._count
        for place, gradient in zip(self._places[0], self.go_on(self._places[0]), strict=True):
            found[place] = gradient
        return tuple(found)

    def skip(self) -> None:
        """Let all stages of the backward that begins return no gradient."""
        self._idle = True

    def go_on(self, places: tuple[int, ...]) -> tuple[Tensor | None, ...]:
        """The gradients of the next stage, for the inputs at these places."""
        if self._idle:
            return (None,) * len(places)
        if self._code is None:
            raise RuntimeError(
                "the stages of a patched layer's backward ran out of order; run one backward through a graph at a time"
            )
        try:
            with autocast_off(self._device), below_autograd(), layer_calls.running(self._calls):
                next(self._code)
        except StopIteration as end:
            self._code = None
            return tuple(end.value[place] for place in places)
        found, self._box[:] = tuple(self._box), ()
        return found


class Stage(torch.autograd.Function):
    """The node of a further stage. It keeps nothing. Its output is an empty tensor, just for the order of the nodes."""

    @staticmethod
    def forward(ctx: Any, stages: Stages, places: tuple[int, ...], link: Tensor | None, *inputs: Tensor | None) -> Any:
        ctx.set_materialize_grads(False)
        ctx.go_on = partial(stages.go_on, places)
        return next(x for x in inputs if x is not None and x.is_floating_point()).new_empty(0)

    @staticmethod
    @partial(once_differentiable, always=True)
    def backward(ctx: Any, _: Tensor | None) -> Any:
        return (None, None, None, *ctx.go_on())


def stages_of(ctx: Any) -> Stages | None:
    """The stages of a backward. Raises RuntimeError if it runs for several samples: later stages run once."""
    if ctx.stages is not None and getattr(ctx, "runs_again", False):
        raise RuntimeError(
            "a patched layer cannot compute gradients of several samples at once where gradients are added to those "
            "that are there; call zero_grad(set_to_none=True) before the forward, or unpatch_model(model)"
        )
    return ctx.stages  # type: ignore[no-any-return]


def no_gradients(ctx: Any, stages: Stages | None) -> tuple[None, ...]:
    """What a backward returns if no output has a gradient: autograd runs nodes below a tensor that has none, too."""
    if stages is not None:
        stages.skip()
    return (None,) * len(ctx.needs_input_grad)


def run_backward(backward: Callable[..., Any], stages: Stages | None, saved: list[Any]) -> tuple[Tensor | None, ...]:
    """The gradients of a plan's inputs; if its backward stops (`stages`), only those of its first stage.

    `saved` is the list that the code takes.
    """
    if stages is not None:
        return stages.begin(backward, saved)
    with below_autograd():
        found: tuple[Tensor | None, ...] = backward(saved)
    return found
