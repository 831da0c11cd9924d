"""The search for the largest number that fits, which all such questions share."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from hf_actcompress.quick.formula import largest


@pytest.mark.parametrize("seed", range(6))
def test_the_search_finds_the_border_of_any_growing_function(seed: int) -> None:
    draw = random.Random(seed)
    steps = [draw.randint(1, 50) + (n if seed % 2 else 0) for n in range(200)]
    sizes = list(itertools.accumulate(steps))
    for budget in (0, sizes[0], sizes[5] + 1, sizes[150]):

        def size(n: int) -> int:
            return sizes[n - 1] if n <= len(sizes) else 10**9

        expected = sum(s <= budget for s in sizes)
        assert largest(size, budget) == expected
        assert largest(size, budget, 40) == min(expected, 40)


# the largest number of calls: for a line, a line through two points finds the border; else every fifth call halves the
# interval
@pytest.mark.parametrize(
    ("size", "most_asked"), [(lambda n: 7 + 3 * n, 4), (lambda n: n**2, 5 * 16), (lambda n: n**3, 5 * 16)]
)
def test_the_search_asks_few_times(size: Callable[[int], int], most_asked: int) -> None:
    for border in (1, 3, 50, 1500, 40_000):
        asked: list[int] = []

        def counted(n: int, asked: list[int] = asked) -> int:
            asked.append(n)
            return size(n)

        assert largest(counted, size(border), 1 << 16) == border
        assert len(asked) <= most_asked
