"""A step as a list of allocations and frees, and the same step of a model with more layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..extrapolation import Extrapolated
from ..fake_step.step import FakeStep, History
from ..growth import Growth


@dataclass(frozen=True)
class Trace:
    """The allocations of one step, in order.

    Args:
        events: A positive number is an allocation of so many bytes. A negative one, -n, frees what event n - 1
            allocated. 0 stands for a free whose allocation was not found.
        gradients: Events that allocate what is then added to a weight's gradient.
    """

    events: Sequence[int]
    gradients: frozenset[int] = frozenset()

    @property
    def peak(self) -> int:
        """The most bytes alive at once."""
        live = most = 0
        for event in self.events:
            live += event if event >= 0 else -self.events[-event - 1]
            most = max(most, live)
        return most


def trace_of(found: Extrapolated, block: int) -> Trace | None:
    """The trace of the whole model, whose sizes are multiples of `block`.

    Returns None if the places of the layers in the shortest model are not known well enough to repeat them.
    """
    base = found.base
    if base is None or base.history is None:
        return None
    recorded, at_marks = _recorded(base.history, block)
    windows = []
    for growth, times in found.more:
        window = _window(base, growth, at_marks)
        if window is None:
            return None
        windows.append((window, times))
    # a later window of the forward does not move an earlier one
    windows.sort(key=lambda pair: -pair[0].forward[0])
    for position, (window, times) in enumerate(windows):
        if times > 0:
            recorded = _Repeated(recorded, window, times + 1).trace()
            rest = windows[position + 1 :]
            windows[position + 1 :] = [(other.moved(window, times), more) for other, more in rest]
    return recorded


def _recorded(history: History, block: int) -> tuple[Trace, list[int]]:
    """The trace of a step that was run, and the number of events up to each mark of its history.

    What is made and freed between two marks was not counted there, because a device does not make it. Within such a
    part frees come first, so that a sum that the engine writes in place takes the place of its first operand.
    """
    events: list[int] = []
    at_marks, gradients = [], set()
    sizes: dict[int, int] = {}
    born: dict[int, int] = {}
    done = 0
    for mark in (*history.marks, len(history.changes)):
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
        at_marks.append(len(events))
    return Trace(events, frozenset(gradients)), at_marks


@dataclass(frozen=True)
class _Window:
    """The events of one unit of layers, in the forward and in the backward: from the first, up to the second."""

    forward: tuple[int, int]
    backward: tuple[int, int]

    def moved(self, other: _Window, times: int) -> _Window:
        """This window after the events of the other one were repeated so many more times."""

        def place(event: int) -> int:
            (a, b), (c, d) = other.forward, other.backward
            return event + times * ((b - a) * (event >= b) + (d - c) * (event >= d))

        return _Window(tuple(map(place, self.forward)), tuple(map(place, self.backward)))  # type: ignore[arg-type]


def _window(base: FakeStep, growth: Growth, at_marks: Sequence[int]) -> _Window | None:
    """Where one unit is. The layers are alike from the first place of the forward to which a further unit adds bytes,
    and up to the last one of the backward.
    """
    ahead, (forward, backward) = len(base.forward), growth.allocations
    start = ahead - growth.forward[0]
    if start + 2 * forward <= ahead:
        # not the first unit if there is another one, because the first may free what comes before it
        start += forward
    end = growth.backward[0]
    if start < 1 or start + forward > ahead or end < backward:
        return None

    def events(first: int, count: int) -> tuple[int, int]:
        return at_marks[first - 1], at_marks[first + count - 1]

    return _Window(events(start, forward), events(ahead + end - backward, backward))


class _Repeated:
    """Repeats a unit's events. Each copy frees its own tensors, and those of its neighbours that the unit frees.

    Args:
        short: The trace with the unit once.
        window: Where the unit is.
        count: How often the unit's events are there afterwards.
    """

    def __init__(self, short: Trace, window: _Window, count: int) -> None:
        self._short, self._window, self._last = short, window, count - 1
        self._events: list[int] = []
        self._gradients: set[int] = set()
        # event -> its bytes, while they are alive
        self._live: dict[int, int] = {}

    def trace(self) -> Trace:
        """The longer trace."""
        (a, b), (c, d), last = self._window.forward, self._window.backward, self._last
        self._copy(range(a), 0, 0)
        for copy in range(last + 1):
            self._copy(range(a, b), copy, 0)
        self._copy(range(b, c), last, 0)
        for copy in range(last + 1):
            self._copy(range(c, d), last - copy, copy)
        self._copy(range(d, len(self._short.events)), 0, last)
        return Trace(self._events, frozenset(self._gradients))

    def _copy(self, places: range, ahead: int, behind: int) -> None:
        """Append the events of these places.

        Args:
            places: Events of the short trace.
            ahead, behind: The copy of the forward's and the backward's unit that is next to them, from 0.
        """
        events, live, short = self._events, self._live, self._short.events
        for place in places:
            event = short[place]
            if event > 0:
                if place in self._short.gradients:
                    self._gradients.add(len(events))
                live[len(events)] = event
            elif event < 0:
                event = -self._allocated(-event - 1, ahead, behind) - 1
                live.pop(-event - 1, None)
            events.append(event)

    def _allocated(self, place: int, ahead: int, behind: int) -> int:
        """The event that allocated what the short trace allocated at `place`; -1 if nothing alive has this size."""
        size, live = self._short.events[place], self._live
        for candidate in self._candidates(place, ahead, behind):
            if live.get(candidate) == size:
                return candidate
        return next((event for event in reversed(live) if live[event] == size), -1)

    def _candidates(self, place: int, ahead: int, behind: int) -> Iterator[int]:
        (a, b), (c, d) = self._window.forward, self._window.backward
        moved = place + self._last * (b - a)
        if 2 * a - b <= place < 2 * b - a:
            # the unit's own, or a neighbour's
            yield place + ahead * (b - a)
        if place >= 2 * c - d:
            yield moved + behind * (d - c)
        if place >= b:
            yield moved
        yield place
