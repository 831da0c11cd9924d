"""Where in the shortest model's timeline its last layer is: with another batch that says what further layers add."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

from .fake_step.step import FakeStep


@dataclass(frozen=True)
class Unit:
    """The last layer, or the last period of layers, of the shortest model in the forward.

    Args:
        begin, end: Which of the forward's allocations.
        forward, backward: How many allocations there are.
        before, after: In how many of them, around the loss, a further unit is there, too.
    """

    begin: int
    end: int
    forward: int
    backward: int
    before: int
    after: int

    def fits(self, step: FakeStep) -> bool:
        """Whether the shortest model did the same with another batch."""
        return (self.forward, self.backward) == (len(step.forward), len(step.backward))

    def nbytes(self, step: FakeStep) -> int:
        """What a further unit adds."""
        return sum(_added(step)[self.begin : self.end])


def unit_of(base: FakeStep, longer: FakeStep, forward: tuple[int, int], backward: tuple[int, int]) -> Unit | None:
    """The unit, if one more of them does in the forward what the last one does, and nothing else.

    Args:
        base, longer: Of the shortest model, and of one with one more.
        forward, backward: As `Growth` has them.
    """
    added, others = _added(base), _added(longer)
    count = len(others) - len(added)
    end = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(added, others, strict=False)))
    if not 0 < count <= end or [*added[:end], *added[end - count : end], *added[end:]] != others:
        return None
    unit = Unit(end - count, end, len(base.forward), len(base.backward), forward[0], backward[0])
    # a cast that is held until the forward ends is there at its end and not kept
    return unit if unit.nbytes(base) == forward[1] == backward[1] else None


def _added(step: FakeStep) -> Sequence[int]:
    """What is alive at each of the forward's allocations more than at the one before."""
    return [later - earlier for earlier, later in pairwise((0, *step.forward))]
