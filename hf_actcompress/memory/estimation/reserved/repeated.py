"""A step as a list of allocations and frees, and the same step of a model with more layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


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
        for at in range(len(self.events)):
            live += self.change(at)
            most = max(most, live)
        return most

    def change(self, at: int) -> int:
        """By how many bytes event number `at` changes what is alive."""
        event = self.events[at]
        return event if event >= 0 else -self.events[-event - 1]


@dataclass(frozen=True)
class Unit:
    """The events of one unit of layers in the forward and in the backward: the first, and the one after the last."""

    forward: tuple[int, int]
    backward: tuple[int, int]

    def moved(self, other: Unit, times: int) -> Unit:
        """This unit after the events of the other one were repeated so many more times."""

        def place(event: int) -> int:
            (a, b), (c, d) = other.forward, other.backward
            return event + times * ((b - a) * (event >= b) + (d - c) * (event >= d))

        return Unit(
            (place(self.forward[0]), place(self.forward[1])), (place(self.backward[0]), place(self.backward[1]))
        )


class Repeated:
    """Repeats a unit's events. Each copy frees its own tensors, and those of its neighbours that the unit frees.

    Args:
        short: The trace with the unit once.
        unit: Where the unit is.
        count: How often the unit's events occur in the longer trace.
    """

    def __init__(self, short: Trace, unit: Unit, count: int) -> None:
        self._short, self._unit, self._last = short, unit, count - 1
        self._events: list[int] = []
        self._gradients: set[int] = set()
        # event -> its bytes, while they are alive
        self._live: dict[int, int] = {}

    def trace(self) -> Trace:
        """The longer trace."""
        (a, b), (c, d), last = self._unit.forward, self._unit.backward, self._last
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
            ahead, behind: The number, from 0, of the unit's copy in the forward and in the backward that these events
                belong to or are next to.
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
        """The new trace's event for the allocation at `place` of the short one; -1 if nothing alive has this size."""
        size, live = self._short.events[place], self._live
        for candidate in self._candidates(place, ahead, behind):
            if live.get(candidate) == size:
                return candidate
        return next((event for event in reversed(live) if live[event] == size), -1)

    def _candidates(self, place: int, ahead: int, behind: int) -> Iterator[int]:
        (a, b), (c, d) = self._unit.forward, self._unit.backward
        moved = place + self._last * (b - a)
        if 2 * a - b <= place < 2 * b - a:
            # the unit's own, or a neighbour's
            yield place + ahead * (b - a)
        if place >= 2 * c - d:
            yield moved + behind * (d - c)
        if place >= b:
            yield moved
        yield place
