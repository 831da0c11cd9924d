"""What one more unit of a run of layers adds to a step, and how it is read off a step with another batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from .fake_step.step import FakeStep

# places that agree on a unit's bytes
_ENOUGH = 4


@dataclass(frozen=True)
class Growth:
    """What one more unit of a run adds, and where in the timeline of the shorter model.

    Args:
        step: Its bytes.
        forward: (so many of the last allocations of the forward, bytes that they have on top).
        backward: (so many of the first ones of the backward, bytes that they have on top).
        behind: (so many of the last ones of the backward, bytes that they have on top): what a unit's backward leaves.
    """

    step: FakeStep
    forward: tuple[int, int]
    backward: tuple[int, int]
    behind: tuple[int, int] = (0, 0)

    def on_top(self, base: FakeStep, at: int) -> int:
        """What a further unit adds at an allocation of the shorter model, counted through forward and backward."""
        ahead, behind = len(base.forward), len(base.backward)
        if at < ahead:
            return self.forward[1] if ahead - at <= self.forward[0] else 0
        at -= ahead
        # of the same allocation there are several in the longer model, before a further unit and after it
        before = self.backward[1] if at < self.backward[0] else 0
        return max(before, self.behind[1]) if behind - at <= self.behind[0] else before


@dataclass(frozen=True)
class Unit:
    """Where two units that follow each other are in the backward of the shorter model.

    A batch of another size moves them little: what comes before the layers and after them may take more turns (the
    loss of more tokens), so places in the forward are counted from its start, in the backward from its end.

    Args:
        places: In the backward, at which there is a unit's bytes more than at their like in the next unit.
        apart: Allocations of one unit in the backward.
        moved: The first place in the forward to which a further unit adds bytes, and the first one in the backward to
            which it does not.
        freed: Bytes of a unit that the end of the forward frees: the casts of an autocast, whatever the batch is.
    """

    places: range
    apart: int
    moved: tuple[int, int]
    freed: int

    def growth(self, base: FakeStep) -> Growth | None:
        """What a further unit adds to the step of the shorter model with another batch.

        None if the places are not what they were: then it has to be run.
        """
        ahead, behind = len(base.forward), len(base.backward)
        if self.places[-1] > behind or self.moved[0] > ahead:
            return None
        dropped = {base.backward[behind - at] - base.backward[behind - at + self.apart] for at in self.places}
        if len(dropped) > 1:
            return None
        kept = dropped.pop()
        at_end = kept + self.freed
        return Growth(FakeStep(kept, 0, {}), (ahead - self.moved[0], at_end), (behind - self.moved[1], kept))


def growth_of(base: FakeStep, longer: FakeStep) -> Growth:
    """What the longer one has more than the shorter one."""
    step = longer.plus(base, -1)
    # an autocast holds its casts until the forward has ended
    at_end = longer.forward[-1] - base.forward[-1]
    forward = _in_common(reversed(base.forward), reversed(longer.forward), at_end)
    backward = _in_common(base.backward, longer.backward, step.kept)
    left = longer.backward[-1] - base.backward[-1] if base.backward else 0
    behind = _in_common(reversed(base.backward), reversed(longer.backward), left) if left else 0
    return Growth(step, (forward, at_end), (backward, step.kept), (behind, left))


def unit_of(base: FakeStep, longer: FakeStep, growth: Growth) -> Unit | None:
    """Where the units are, or None if the last one of the shorter model is not like the one that is added."""
    (reach, at_end), (end, kept) = growth.forward, growth.backward
    behind, apart = len(base.backward), len(longer.backward) - len(base.backward)
    # what all layers share is freed in the backward of the first one, so the longest row is taken
    rows = [range(0)]
    for at in range(apart + 1, behind + 1):
        if base.backward[behind - at] - base.backward[behind - at + apart] == kept:
            rows[-1] = range(rows[-1].start if rows[-1] else at, at + 1)
        elif rows[-1]:
            rows.append(range(0))
    places = max(rows, key=len)
    if len(places) < _ENOUGH or growth.behind[1]:
        return None
    return Unit(places, apart, (len(base.forward) - reach, behind - end), at_end - kept)


def _in_common(shorter: Iterable[int], longer: Iterable[int], apart: int) -> int:
    """How many allocations, from the start, are the same but for `apart` bytes."""
    return sum(1 for _ in takewhile(lambda pair: pair[1] - pair[0] == apart, zip(shorter, longer, strict=False)))


def peak_with(base: FakeStep, more: Sequence[tuple[Growth, int]]) -> int:
    """Of the model with so many further units of each run."""
    return max(
        live + sum(times * growth.on_top(base, at) for growth, times in more)
        for at, live in enumerate((*base.forward, *base.backward))
    )
