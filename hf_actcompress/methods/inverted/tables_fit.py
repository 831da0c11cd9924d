"""The form of a row of `tables.py`, which recipes/fit_inverted_activations.py writes."""

from __future__ import annotations

from typing import NamedTuple


class InvertedFit(NamedTuple):
    """f' of an activation with one minimum, as a function of the output.

    Args:
        x_min, y_min: The minimum.
        split, end: Values of s = sqrt(y - y_min): where the two pieces on the right meet, and where the outer one ends.
        centres, halves: Centre and half width of each piece's range: left (in w), right inner, right outer (in s).
        coefficients: Per piece, by ascending powers of its coordinate mapped to [-1, 1].
    """

    x_min: float
    y_min: float
    split: float
    end: float
    centres: tuple[float, ...]
    halves: tuple[float, ...]
    coefficients: tuple[tuple[float, ...], ...]
