"""Bit widths under a budget: each group gets the bits that reduce the sum of squared errors most per bit spent."""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass

# the widths that a tensor may get
BITS = (2, 3, 4, 8)


@dataclass(frozen=True)
class Sensitivity:
    """A group of tensors that get the same bits.

    Args:
        elements: How many are stored.
        error: Relative error of the whole gradient when these tensors alone are stored in 4 bits.
    """

    elements: int
    error: float

    def squared_error(self, bits: int) -> float:
        """The expected error at another width: the step of a uniform quantiser is range / (2^bits - 1)."""
        scaled: float = self.error * 15 / (2**bits - 1)
        return scaled * scaled


def allocate(groups: Sequence[Sensitivity], average_bits: float) -> list[int]:
    """Bits of each group, at most `average_bits` per element on average.

    Greedy by error removed per bit, from the fewest bits up: optimal up to one group's step, because the error is
    convex in the bits (GACT, arXiv 2206.11357, solves the same problem in this way).

    Raises:
        ValueError: `average_bits` outside of 2 .. 8.
    """
    if not BITS[0] <= average_bits <= BITS[-1]:
        raise ValueError(f"average_bits lies between {BITS[0]} and {BITS[-1]}; got {average_bits}")
    widths = [BITS[0]] * len(groups)
    left = (average_bits - BITS[0]) * sum(group.elements for group in groups)
    steps = [(-_gain(group, 0), index, 0) for index, group in enumerate(groups)]
    heapq.heapify(steps)
    while steps:
        _, index, level = heapq.heappop(steps)
        cost = (BITS[level + 1] - BITS[level]) * groups[index].elements
        if cost > left:
            continue
        left -= cost
        widths[index] = BITS[level + 1]
        if level + 2 < len(BITS):
            heapq.heappush(steps, (-_gain(groups[index], level + 1), index, level + 1))
    return widths


def _gain(group: Sensitivity, level: int) -> float:
    """Squared error removed per bit by going from `BITS[level]` to the next width."""
    low, high = BITS[level], BITS[level + 1]
    removed = group.squared_error(low) - group.squared_error(high)
    return removed / ((high - low) * max(group.elements, 1))


def layer_of(module: str) -> str:
    """The name up to the first number: "model.layers.3" of "model.layers.3.mlp.act_fn"; else the name itself."""
    found = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", module)
    return found.group() if found else module
