"""A layer as it was in a call, and what decides which plan the call runs."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ..graphs.checkpointed import recompute_of
from ..graphs.plan import LayerPlan
from ..graphs.values import may_be_read, numbers_in
from ..modules.checkpoint import KeptInput
from ..modules.tiled import has_many_rows
from .given import CallArguments
from .look import Attributes, LayerLook
from .store import Kind, Known
from .use import Use, use_of

# how many more calls fail the checks of a plan than pass them until it is given up
MISSED = 16
FAILED = "what its code looks at is not as it was assumed"
_of_weight = attrgetter("dtype", "requires_grad")


@dataclass
class State:
    """A layer as it was in a call: how it looked, its kind, and where its weights are."""

    look: LayerLook
    kind: Kind
    known: dict[Hashable, Any]
    base: Hashable
    attributes: Attributes
    weights: tuple[list[dict[str, Any]], list[str]]
    adapters: list[nn.Module]
    # whether it computes an MLP in tiles where it is checkpointed and has many rows
    tiles: bool
    why_not: str = ""
    last: tuple[Any, Known | None] = (None, None)
    uses: dict[Any, Use] = field(default_factory=dict)

    def looked_at(self, given: CallArguments) -> set[int]:
        """The integers among the arguments, by number, that the layer's code has looked at in calls of that form."""
        found: set[int] = self.known.setdefault(("looked at", given.form), set())
        return found

    def read(self, given: CallArguments) -> set[int]:
        """The weights and tensors, by place, in which the layer's code has read numbers in calls of that form."""
        found: set[int] = self.known.setdefault(("read", given.form), set())
        return found

    def key(
        self,
        given: CallArguments,
        weights: list[Any],
        keeps: KeptInput | None,
        left_out: type,
        autocast: torch.dtype | None,
    ) -> list[Any]:
        """What decides which plan a call runs. The sizes are in the last item."""
        x = given.tensors[0]
        return [
            autocast, recompute_of(keeps), left_out, keeps is not None and self.tiles and has_many_rows(x),
            x.device, given.form,
            list(map(_of_weight, weights)),
            [given.integers[i] for i in sorted(self.looked_at(given))] if given.integers else [],
            self._numbers([*weights, *given.tensors], self.read(given)) if self.kind.reads else [],
            [(y.shape, y.stride(), y.dtype, y.requires_grad) for y in given.tensors],
        ]  # fmt: skip

    @staticmethod
    def _numbers(inputs: list[Any], read: set[int]) -> list[Hashable]:
        return [numbers_in(inputs[i]) if may_be_read(inputs[i]) else None for i in sorted(read)]

    def use(self, layer: nn.Module, known: Known, plan: LayerPlan, keeps: KeptInput | None, real: bool) -> Use:
        """How the layer runs a plan, with data (`real`) or with tensors without data."""
        found = self.uses.get((id(known), keeps, real))
        if found is None:
            found = self.uses[id(known), keeps, real] = use_of(layer, known, plan, keeps, real)
        return found


def frozen(key: Any) -> Hashable:
    """A key of lists as one that a dictionary takes."""
    return tuple(map(frozen, key)) if isinstance(key, list) else key


def fails(known: Known, failed: bool) -> bool:
    """Whether a call has failed the checks of a plan, which is given up if most calls do: each runs twice then."""
    known.missed = max(known.missed + (1 if failed else -1), 0)
    if known.missed > MISSED:
        known.plan = FAILED
    return failed
