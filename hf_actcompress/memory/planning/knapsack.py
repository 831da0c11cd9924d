"""Dynamic programming: the cheapest choice of one option per layer within a number of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# the unit of sizes is the capacity divided by this; sizes are rounded up, so L layers waste at most L units
_UNITS = 1 << 15


@dataclass(frozen=True)
class Weighed:
    """An option of a layer, as the choice sees it: the bytes that the layer keeps, and a cost of 0 or more."""

    nbytes: int
    cost: float


def choose(layers: Sequence[Sequence[Weighed]], capacity: int) -> list[int] | None:
    """The option of each layer, by index, with the least total cost among those that keep at most `capacity` bytes.

    Returns:
        One index per layer, or None if no choice fits.
    """
    if sum(min(option.nbytes for option in options) for options in layers) > capacity:
        return None
    unit = max(1, -(-capacity // _UNITS))
    # best[c]: the least cost of the layers so far within c units
    best = torch.zeros(capacity // unit + 1, dtype=torch.float64)
    choices: list[Tensor] = []
    for options in layers:
        costs = torch.stack([_shifted(best, -(-o.nbytes // unit)) + o.cost for o in options])
        best, choice = costs.min(0)
        choices.append(choice)
    if not best[-1].isfinite():
        # the rounding up has used the rest of the capacity
        return [min(range(len(options)), key=lambda i: options[i].nbytes) for options in layers]
    return _traced_back(layers, choices, unit)


def _shifted(best: Tensor, units: int) -> Tensor:
    """The costs after an option of this many units: entry c is what was entry c - units."""
    taken = torch.full_like(best, torch.inf)
    if units < best.numel():
        taken[units:] = best[: best.numel() - units]
    return taken


def _traced_back(layers: Sequence[Sequence[Weighed]], choices: list[Tensor], unit: int) -> list[int]:
    left = choices[-1].numel() - 1
    picked = []
    for options, choice in zip(reversed(layers), reversed(choices), strict=True):
        index = int(choice[left])
        picked.append(index)
        left -= -(-options[index].nbytes // unit)
    return picked[::-1]


def undominated(options: Sequence[Weighed]) -> list[int]:
    """Indices, ordered by bytes, of the options that no other option equals or beats in both bytes and cost."""
    order = sorted(range(len(options)), key=lambda i: (options[i].nbytes, options[i].cost))
    kept: list[int] = []
    for i in order:
        if not kept or options[i].cost < options[kept[-1]].cost:
            kept.append(i)
    return kept
