"""Parts of a weight that an adapter has made for one call: recomputed from the parameter and the adapter.

Stock keeps one part of the adapted weight of a stack of experts for each expert that was chosen. The forward has made
all of that weight, so to make all of it again for the parts of one layer takes no memory that was not needed before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .record import Derived, Recipe
from .registry import known_record


@dataclass(frozen=True)
class AdaptedWeight:
    """Recompute function of a weight: `compute` makes it of the parameter and the tensors of the adapter."""

    compute: Callable[..., Tensor]

    def __call__(self, *sources: Tensor) -> Tensor:
        """The weight."""
        return self.compute(*sources)


def part_of_adapted_weight(x: Tensor) -> Derived | None:
    """The record of x, if x is a view of a part of an adapted weight; else None. All parts share the whole weight."""
    base = x._base
    whole = None if base is None else known_record(base)
    if base is None or not isinstance(whole, Derived) or not isinstance(whole.recipe.recompute, AdaptedWeight):
        return None
    start = int(x.storage_offset() - base.storage_offset())
    return Derived(Recipe(partial(_part, shape=x.shape, stride=x.stride(), start=start)), (whole,))


def _part(whole: Tensor, shape: torch.Size, stride: tuple[int, ...], start: int) -> Tensor:
    """Recompute function of a part of a weight that is contiguous, as `declare` wants it to be."""
    whole = whole.contiguous()
    return whole.as_strided(shape, stride, int(whole.storage_offset()) + start)
