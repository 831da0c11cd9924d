"""Where in the shortest model's allocations its last layer is: with another batch that says what further layers add."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from .fake_step.step import FakeStep


@dataclass(frozen=True)
class Unit:
    """The last layer, or the last period of layers, of the shortest model in the forward.

    Args:
        begin, end: Which of the changes, without those of what does not count.
        changes, forward, backward: How many changes there are up to a forward's last allocation, and how many
            allocations in both directions.
        before, after: In how many allocations, around the loss, a further unit is there, too.
    """

    begin: int
    end: int
    changes: int
    forward: int
    backward: int
    before: int
    after: int

    def fits(self, step: FakeStep) -> bool:
        """Whether the shortest model did the same with another batch."""
        counts = (self.changes, self.forward, self.backward)
        return counts == (len(_changes(step)), len(step.forward), len(step.backward))

    def nbytes(self, step: FakeStep) -> int:
        """What a further unit adds."""
        return sum(_changes(step)[self.begin : self.end])


def unit_of(base: FakeStep, longer: FakeStep, forward: tuple[int, int], backward: tuple[int, int]) -> Unit | None:
    """The unit, if one more of them does in the forward what the last one does, and nothing else.

    Args:
        base, longer: Of the shortest model, and of one with one more.
        forward, backward: As `Growth` has them.
    """
    changes, others = list(_changes(base)), list(_changes(longer))
    count = len(others) - len(changes)
    end = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(changes, others, strict=False)))
    repeated = [*changes[:end], *changes[end - count : end], *changes[end:]]
    if not 0 < count <= end or repeated != others:
        return None
    unit = Unit(end - count, end, len(changes), len(base.forward), len(base.backward), forward[0], backward[0])
    # a cast that is held until the forward ends is there at its end and not kept
    return unit if unit.nbytes(base) == forward[1] == backward[1] else None


def _changes(step: FakeStep) -> Sequence[int]:
    """Up to the last allocation of the forward, as the allocator counts: what is dropped behind it is in no order."""
    if step.history is None:
        return ()
    block = step.history.block
    sizes = step.history.changes[: step.history.marks[len(step.forward) - 1]]
    return [(size // block if size < 0 else -(-size // block)) * block for size in sizes if size]
