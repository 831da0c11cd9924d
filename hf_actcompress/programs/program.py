"""A program: steps over numbered values, run by one autograd Function."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..ops.first_order import once_differentiable
from ..records import applied, saved_next
from .steps import Step, Values


@dataclass(frozen=True)
class Plan:
    """How a program runs when gradients of some of its inputs are asked for.

    Attributes:
        wanted: The values that need a gradient.
        kept: The values that are kept for backward, inputs among them.
        order: Of backward: a step, whether it is made again (True) or differentiated (False), and which values nobody
            reads after it.
    """

    wanted: frozenset[int]
    kept: tuple[int, ...]
    order: tuple[tuple[bool, Step, tuple[int, ...]], ...]


@dataclass
class Program:
    """Steps over numbered values.

    Attributes:
        inputs: How many of the first values are given.
        outputs: The values that it returns.
        values: How many values there are.
    """

    inputs: int
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    values: int
    plans: dict[tuple[bool, ...], Plan] = field(default_factory=dict)

    def plan(self, needed: tuple[bool, ...]) -> Plan:
        """The plan for gradients of those inputs that are `needed`; made once."""
        found = self.plans.get(needed)
        if found is None:
            found = self.plans[needed] = self._plan(needed)
        return found

    def _plan(self, needed: tuple[bool, ...]) -> Plan:
        wanted = {i for i, x in enumerate(needed) if x}
        for step in self.steps:
            if wanted.intersection(step.inputs()):
                wanted.add(step.y)
        frozen, maker = frozenset(wanted), {step.y: step for step in self.steps}
        order: list[tuple[bool, Step]] = []
        kept: list[int] = []
        made: set[int] = set()

        def want(value: int) -> None:
            """Have a value at hand in backward: kept, or made again from what is."""
            step = maker.get(value)
            if value in made or value in kept:
                return
            # what needs no gradient is one tensor to keep, and what it is made from would be kept for it alone
            if step is None or not step.rebuilt or value not in frozen:
                kept.append(value)
                return
            # what it is made from: its inputs, and what its own forward left behind
            for source in {*step.inputs(), *step.needs(frozen)} - {value}:
                want(source)
            made.add(value)
            order.append((True, step))

        for step in reversed(self.steps):
            if step.y not in frozen:
                continue
            for value in step.needs(frozen):
                want(value)
            order.append((False, step))
        return Plan(frozen, tuple(kept), tuple(_freeing(order, frozen)))

    def __call__(self, *inputs: Tensor | None) -> Any:
        """Run it: the outputs, a tensor or a tuple of them."""
        return applied(ProgramFunction, self, *inputs)


def _freeing(
    order: Sequence[tuple[bool, Step]], wanted: frozenset[int]
) -> Iterator[tuple[bool, Step, tuple[int, ...]]]:
    """The order of backward with the values that are read for the last time by each of its entries."""
    reads = [{*step.needs(wanted), *(step.inputs() if again else ())} for again, step in order]
    for index, (again, step) in enumerate(order):
        later: set[int] = set().union(*reads[index + 1 :])
        yield again, step, tuple((reads[index] | {step.y}) - later) if not again else ()


class ProgramFunction(torch.autograd.Function):
    """Keeps what the plan says, weights by reference."""

    @staticmethod
    def forward(ctx: Any, program: Program, *inputs: Tensor | None) -> Any:
        v: Values = [*inputs, *[None] * (program.values - program.inputs)]
        for step in program.steps:
            step.forward(v)
        plan = ctx.plan = program.plan(ctx.needs_input_grad[1:])
        ctx.program = program
        # a weight as its data are now, as stock's views keep it: `param.data = ...` changes the parameter alone
        kept = [x.detach() if type(x) is Parameter else x for x in [v[i] for i in plan.kept]]
        saved_next([x for x in kept if x is not None])
        ctx.save_for_backward(*kept)
        outputs = program.outputs
        return v[outputs[0]] if len(outputs) == 1 else tuple([v[i] for i in outputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        plan, program = ctx.plan, ctx.program
        v: Values = [None] * program.values
        g: Values = [None] * program.values
        for i, x in zip(plan.kept, ctx.saved_tensors, strict=True):
            v[i] = x
        for i, dy in zip(program.outputs, grads, strict=True):
            g[i] = dy
        wanted = plan.wanted
        for again, step, unread in plan.order:
            if again:
                step.rebuild(v)
            else:
                step.backward(v, g, wanted)
                g[step.y] = None
            for i in unread:
                v[i] = None
        return (None, *g[: program.inputs])


class Builder:
    """Numbers the values of a program while its steps are put down in order."""

    def __init__(self, inputs: Sequence[str]) -> None:
        self.at = {name: i for i, name in enumerate(inputs)}
        self.inputs = len(self.at)
        self.steps: list[Step] = []

    def value(self, name: str) -> int:
        return self.at.setdefault(name, len(self.at))

    def add(self, step: type[Step], y: str, **options: Any) -> None:
        """Put down a step; its options that name a value are strings of names that are known."""
        fields = {name: self.at[x] if isinstance(x, str) and x in self.at else x for name, x in options.items()}
        self.steps.append(step(self.value(y), **fields))

    def program(self, *outputs: str) -> Program:
        return Program(self.inputs, tuple(self.steps), tuple(self.at[name] for name in outputs), len(self.at))
