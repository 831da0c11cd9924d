"""Backwards in which some outputs of a program have no gradient: a loss of what a cache holds, for example.

What depends on these outputs alone gets no gradient, as in stock. A gradient of zeros in its place would let an
optimizer's weight decay move weights that stock leaves alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .plan import ProgramPlan


@dataclass(frozen=True)
class PartialGradients:
    """What zeros are made of in the place of a gradient that is not there: for each output its shape and dtype."""

    like: tuple[tuple[torch.Size, torch.dtype], ...]

    @classmethod
    def of(cls, ctx: Any, plan: ProgramPlan, outputs: Sequence[Tensor]) -> PartialGradients | None:
        """Ask autograd for None where there is no gradient. None if one output alone wants one."""
        ctx.set_materialize_grads(False)
        if len(plan.graded) < 2:
            return None
        return cls(tuple((outputs[i].shape, outputs[i].dtype) for i in plan.graded))

    def completed(
        self, plan: ProgramPlan, grads: Sequence[Tensor | None]
    ) -> tuple[tuple[Tensor | None, ...], frozenset[int]]:
        """The gradients of the outputs, as the plan's code takes them, and the inputs that get none."""
        given = [place for place, i in enumerate(plan.graded) if grads[i] is not None]
        if len(given) == len(plan.graded):
            return tuple(grads), frozenset()
        found = list(grads)
        device = next(g.device for g in grads if g is not None)
        for i, (shape, dtype) in zip(plan.graded, self.like, strict=True):
            if found[i] is None and i not in plan.optional:
                found[i] = torch.zeros(shape, dtype=dtype, device=device)
        reached = frozenset[int]().union(*(plan.reached[place] for place in given))
        return tuple(found), frozenset[int]().union(*plan.reached) - reached
