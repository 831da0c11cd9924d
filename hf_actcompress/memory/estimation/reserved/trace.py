"""The trace of a whole model's step, from the step of a model with a few of its layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..extrapolation import Extrapolated
from ..fake_step.step import FakeStep
from .repeated import Repeated, Trace, Unit


@dataclass(frozen=True)
class _Recorded:
    """The trace of a step that was run, and in its forward and backward the ranges of events between two marks, where a
    peak may be; empty ranges are left out.
    """

    trace: Trace
    forward: Sequence[range]
    backward: Sequence[range]


def trace_of(found: Extrapolated, block: int) -> Trace | None:
    """The trace of the whole model, whose sizes are multiples of `block`.

    Returns None if the layers of the steps that were run do not look alike, so that none of them can be repeated, or if
    the trace has another peak than the step.
    """
    if found.base is None or found.base.history is None:
        return None
    if not found.has_longer:
        return None
    base = step = _recorded(found.base, block)
    longer = [_recorded(growth.longer, block) for growth, _ in found.more if growth.longer is not None]
    done = 0
    if len(longer) == 1:
        # The step with one more unit has three of them. The middle one is between two equal ones, so it is the one
        # that can be repeated.
        step, done = longer[0], 1
    units = []
    for more, (_, times) in zip(longer, found.more, strict=True):
        forward = _middle(step.trace, step.forward, len(more.forward) - len(base.forward))
        backward = _middle(step.trace, step.backward, len(more.backward) - len(base.backward))
        if forward is None or backward is None:
            return None
        units.append((Unit(forward, backward), times - done))
    whole = _repeated(step.trace, units)
    return whole if whole.peak == found.step.peak else None


def _repeated(trace: Trace, units: list[tuple[Unit, int]]) -> Trace:
    """The trace in which each unit occurs as many more times as the number beside it says."""
    # the last unit of the forward comes first: repeating it does not change where the earlier ones are
    units.sort(key=lambda pair: -pair[0].forward[0])
    for at, (unit, times) in enumerate(units):
        trace = Repeated(trace, unit, times + 1).trace()
        units[at + 1 :] = [(other.moved(unit, times), more) for other, more in units[at + 1 :]]
    return trace


def _recorded(step: FakeStep, block: int) -> _Recorded:
    """Read the trace off a step's history.

    A storage that is both made and freed between two marks is left out, because a device does not make it. Between two
    marks the frees come first, so that a sum that the engine writes in place gets the block of its first operand.
    """
    history = step.history
    assert history is not None
    events: list[int] = []
    intervals, gradients = [], set()
    sizes: dict[int, int] = {}
    born: dict[int, int] = {}
    done = 0
    for mark in (*history.marks, len(history.changes)):
        first = len(events)
        before = {owner: sizes.get(owner, 0) for owner in history.owners[done:mark]}
        for owner, change in zip(history.owners[done:mark], history.changes[done:mark], strict=True):
            sizes[owner] = sizes.get(owner, 0) + change
        done = mark
        changed = [owner for owner, size in before.items() if sizes[owner] != size]
        events += [-born.pop(owner) - 1 for owner in changed if owner in born]
        for owner in changed:
            if sizes[owner]:
                born[owner] = len(events)
                if owner in history.gradients:
                    gradients.add(len(events))
                events.append(-(-sizes[owner] // block) * block)
        intervals.append(range(first, len(events)))
    ahead = len(step.forward)
    parts = (list(filter(None, part)) for part in (intervals[:ahead], intervals[ahead:-1]))
    forward, backward = (list(_joined(part, events)) for part in parts)
    return _Recorded(Trace(events, frozenset(gradients)), forward, backward)


def _joined(intervals: Sequence[range], events: Sequence[int]) -> Iterator[range]:
    """The intervals, where one that only frees is joined to the next one: whether there is a mark between the end of a
    layer and the beginning of the next one does not make two layers differ."""
    first: int | None = None
    for i, interval in enumerate(intervals):
        first = interval.start if first is None else first
        if i + 1 == len(intervals) or any(events[at] >= 0 for at in interval):
            yield range(first, interval.stop)
            first = None


def _middle(trace: Trace, intervals: Sequence[range], length: int) -> tuple[int, int] | None:
    """The events of one unit, which is the middle of the longest row of intervals that repeat.

    Args:
        trace: The trace.
        intervals: Its forward or its backward.
        length: How many intervals one unit is expected to have. The first forward of an adapter may have more, because
            this package probes the adapter in it. So the distance of shapes that occur once per unit is tried, too.
    """
    if not length:
        return intervals[0].start, intervals[0].start
    shapes = [tuple(map(trace.change, interval)) for interval in intervals]
    row, found = _longest(shapes, [length, _distance(shapes)])
    if 2 * len(row) < found:
        # the step with fewer units may have been the first one, in which layers are traced
        row, found = _longest(shapes, range(length // 2 + 1, 2 * length))
    if 2 * len(row) < found:
        return None
    length = found
    # the first unit may leave something to the second one to free, so that the row is a little shorter than a unit
    first = row.start + max(0, len(row) - length) // 2
    if first + length >= len(intervals):
        return None
    return intervals[first].start, intervals[first + length].start


def _longest(shapes: Sequence[tuple[int, ...]], distances: Sequence[int]) -> tuple[range, int]:
    """Of these distances, the one with the longest row of places whose shapes occur again so many places later."""
    return max(((_row(shapes, n), n) for n in distances if n), key=lambda pair: len(pair[0]))


def _row(shapes: Sequence[tuple[int, ...]], length: int) -> range:
    """The longest row of places whose shapes occur again `length` places later."""
    longest, start = range(0), 0
    for at in range(len(shapes) - length):
        if shapes[at] != shapes[at + length]:
            start = at + 1
        # of rows of equal length the last one, because tensors from before the first unit may still be alive in it
        longest = max(range(start, at + 1), longest, key=len)
    return longest


def _distance(shapes: Sequence[tuple[int, ...]]) -> int:
    """The most frequent distance of shapes that occur three times at equal distances; 0 if there is no such shape."""
    places: dict[tuple[int, ...], list[int]] = {}
    for at, shape in enumerate(shapes):
        places.setdefault(shape, []).append(at)
    found = Counter(at[1] - at[0] for at in places.values() if len(at) == 3 and at[1] - at[0] == at[2] - at[1])
    return found.most_common(1)[0][0] if found else 0
