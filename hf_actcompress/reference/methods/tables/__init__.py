"""Constants that scripts in recipes/ computed: the fits of the approximate derivatives."""

from __future__ import annotations

from typing import NamedTuple

# rows of `ACTIVATIONS` that round otherwise but are the same function as another, whose table they use
SAME_FUNCTION = {"gelu_erf": "gelu", "gelu_new": "gelu_tanh"}


class InvertedFit(NamedTuple):
    """f' of an activation with one minimum, from its output.

    Args:
        x_min, y_min: The minimum.
        split, end: Where, in s = sqrt(y - y_min), the two right pieces meet and the outer one ends.
        centres, halves: Centre and half width of the range of each piece: left (in w), right inner, right outer (in s).
        coefficients: Per piece, in ascending powers of the coordinate mapped to [-1, 1].
    """

    x_min: float
    y_min: float
    split: float
    end: float
    centres: tuple[float, ...]
    halves: tuple[float, ...]
    coefficients: tuple[tuple[float, ...], ...]
