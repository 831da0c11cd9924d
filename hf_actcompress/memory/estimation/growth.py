"""What one more unit of a run of layers adds to a step, and how to read it off a step with another batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile

from .fake_step.step import FakeStep

# how many places of the backward have to agree on a unit's bytes
_ENOUGH = 4


@dataclass(frozen=True)
class Growth:
    """What one more unit of a run adds, and where it adds it in the timeline of the shorter model.

    Args:
        step: The bytes that it adds to the whole step.
        forward: (n, bytes): the last n allocations of the forward have so many bytes more.
        backward: (n, bytes): the first n allocations of the backward have so many bytes more.
        behind: (n, bytes): the last n allocations of the backward have so many bytes more, which the backward of
            the unit leaves allocated.
        longer: The step of the model that has the further unit, if it was run.
    """

    step: FakeStep
    forward: tuple[int, int]
    backward: tuple[int, int]
    behind: tuple[int, int] = (0, 0)
    longer: FakeStep | None = field(default=None, compare=False, repr=False)

    def on_top(self, base: FakeStep, at: int) -> int:
        """Bytes that a further unit adds at allocation `at` of the shorter model's forward and backward."""
        ahead, behind = len(base.forward), len(base.backward)
        if at < ahead:
            return self.forward[1] if ahead - at <= self.forward[0] else 0
        at -= ahead
        # the longer model has this allocation more than once: before and after the backward of the further unit
        before = self.backward[1] if at < self.backward[0] else 0
        return max(before, self.behind[1]) if behind - at <= self.behind[0] else before


@dataclass(frozen=True)
class UnitPlaces:
    """Where two units that follow each other are in the backward of the shorter model.

    A batch of another size moves these places little: what runs before and after the layers may have more
    allocations (the loss of more tokens). So places in the forward are counted from its start, and places in the
    backward from its end.

    Args:
        places: Places of the backward at which exactly one unit's bytes more are alive than at the same place of the
            next unit's backward.
        apart: How many allocations one unit makes in the backward.
        moved: The first place of the forward to which a further unit adds bytes, and the first place of the backward to
            which it adds none.
        freed: Bytes of a unit that are freed when the forward ends: autocast's casts, the same for every batch.
    """

    places: tuple[int, ...]
    apart: int
    moved: tuple[int, int]
    freed: int

    def growth(self, base: FakeStep) -> Growth | None:
        """What a further unit adds to the step of the shorter model with another batch.

        Returns None if the places differ from those found before; then the longer model has to be run.
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
    """The bytes that the longer model's step has beyond the shorter one's."""
    step = longer.plus(base, -1)
    # autocast holds its casts until the forward ends
    at_end = longer.forward[-1] - base.forward[-1]
    forward = _in_common(reversed(base.forward), reversed(longer.forward), at_end)
    backward = _in_common(base.backward, longer.backward, step.kept)
    left = longer.backward[-1] - base.backward[-1] if base.backward else 0
    behind = _in_common(reversed(base.backward), reversed(longer.backward), left) if left else 0
    return Growth(step, (forward, at_end), (backward, step.kept), (behind, left), longer)


def unit_of(base: FakeStep, longer: FakeStep, growth: Growth) -> UnitPlaces | None:
    """Where the units are; None if the last unit of the shorter model differs from the one that is added."""
    (reach, at_end), (end, kept) = growth.forward, growth.backward
    behind, apart = len(base.backward), len(longer.backward) - len(base.backward)
    at_unit = [
        at
        for at in range(apart + 1, behind + 1)
        if base.backward[behind - at] - base.backward[behind - at + apart] == kept
    ]
    # tensors that all layers share are freed in the backward of the first layer and interrupt the row: take the longest
    rows = [[at for _, at in row] for _, row in groupby(enumerate(at_unit), lambda pair: pair[1] - pair[0])]
    longest = max(rows, key=len, default=[])
    # the backward of a first layer that makes no gradient of its input is shorter, and agrees here and there
    places = tuple(longest if len(longest) >= _ENOUGH else at_unit)
    if len(places) < _ENOUGH or growth.behind[1]:
        return None
    return UnitPlaces(places, apart, (len(base.forward) - reach, behind - end), at_end - kept)


def _in_common(shorter: Iterable[int], longer: Iterable[int], apart: int) -> int:
    """How many allocations, from the start, differ by exactly `apart` bytes."""
    return sum(1 for _ in takewhile(lambda pair: pair[1] - pair[0] == apart, zip(shorter, longer, strict=False)))


def peak_with(base: FakeStep, more: Sequence[tuple[Growth, int]]) -> int:
    """The peak in bytes of the model with so many further units of each run."""
    return max(
        live + sum(times * growth.on_top(base, at) for growth, times in more)
        for at, live in enumerate((*base.forward, *base.backward))
    )
