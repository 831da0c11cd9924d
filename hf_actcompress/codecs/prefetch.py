"""Activations in host memory come back in reverse order, a few copies ahead of what backward asks for.

Order, freeing and repeated backwards are tested on a CPU, with a stand-in for the stream; on a CUDA device the tests
marked `gpu` have not been run yet.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any, Protocol

from torch import Tensor

from ..private_apis import at_end_of_backward, current_backward

Tensors = tuple[Tensor, ...]


class Link(Protocol):
    """The way back to a device: copies that run beside the computation."""

    def start(self, tensors: Tensors) -> Any:
        """Begin to copy host tensors; returns what `finish` takes. The copies live as long as that."""
        ...

    def finish(self, arrival: Any) -> Tensors:
        """The tensors on the device, for the computation to wait for and use."""
        ...


class Ticket:
    """One activation in host memory. It is on an autograd ctx, so it holds no tensor except a copy under way."""

    __slots__ = ("__weakref__", "_away", "arrival", "place", "task")

    def __init__(self, tensors: Tensors, place: int) -> None:
        self._away = tuple(map(weakref.ref, tensors))
        # its number among the tickets of its lane
        self.place = place
        self.arrival: Any = None
        # the last backward that asked for it
        self.task = -1

    def away(self) -> Tensors | None:
        """The host tensors, if autograd still holds them."""
        alive = tuple(tensor for reference in self._away if (tensor := reference()) is not None)
        return alive if len(alive) == len(self._away) else None

    def stands_for(self, tensors: Tensors) -> bool:
        """Whether these are the tensors that were moved: saved-tensor hooks may have put others in their place."""
        away = self.away()
        return away is not None and all(a is b for a, b in zip(away, tensors, strict=True))


# an attention asks for four tensors in the order in which they were moved: q, k, v and the output. As many are asked
# for between the first reader of a norm's input (a linear that rebuilds the norm's output) and the last one (the norm)
WINDOW = 4


class Lane:
    """The activations of one device that are in host memory, in the order in which they were moved.

    When backward asks for one, copies of those that left before it are begun, so that they travel while gradients are
    computed: at most `WINDOW` are ahead. The last `WINDOW` that were asked for stay on the device for their other
    consumers. At the end of a backward all of these are dropped.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        # weak references, because a ticket ends with its graph
        self._tickets: list[weakref.ref[Ticket]] = []
        self._ahead: list[Ticket] = []
        self._latest: deque[tuple[Ticket, Any]] = deque(maxlen=WINDOW)
        # the backward in progress, and the place before which it looks for the next copy to begin
        self._task, self._place = -1, -1
        # forward and backward run in different threads
        self._lock = threading.RLock()

    def leave(self, tensors: Tensors) -> Ticket:
        """Note that these host tensors stand for an activation from now on."""
        with self._lock:
            while self._tickets and self._tickets[-1]() is None:
                self._tickets.pop()
            ticket = Ticket(tensors, len(self._tickets))
            self._tickets.append(weakref.ref(ticket))
            return ticket

    def back(self, ticket: Ticket, tensors: Tensors) -> Tensors:
        """The activation on the device, from a copy begun before or now. Begins the copies of the next ones."""
        task = current_backward()
        with self._lock:
            if task not in (-1, self._task):
                self._begin_backward(task)
            arrival = self._arrival(ticket, tensors)
            if task != -1:
                ticket.task = task
                self._latest.append((ticket, arrival))
                self._begin_next(task)
        return self.link.finish(arrival)

    def _begin_backward(self, task: int) -> None:
        # these copies are left from a backward that raised, or belong to one inside of which this one runs
        self._drop()
        self._task, self._place = task, -1
        at_end_of_backward(self._drop)

    def _arrival(self, ticket: Ticket, tensors: Tensors) -> Any:
        arrival, ticket.arrival = ticket.arrival, None
        if arrival is not None:
            self._ahead.remove(ticket)
        else:
            arrival = next((known for other, known in self._latest if other is ticket), None)
        if arrival is not None and ticket.stands_for(tensors):
            return arrival
        # its copy was not begun ahead: it is the first one, or a checkpoint has packed it since
        self._place = max(self._place, ticket.place)
        return self.link.start(tensors)

    def _begin_next(self, task: int) -> None:
        while len(self._ahead) < WINDOW and self._place > 0:
            self._place -= 1
            candidate = self._tickets[self._place]() if self._place < len(self._tickets) else None
            away = candidate.away() if candidate is not None and candidate.task != task else None
            if candidate is not None and candidate.arrival is None and away is not None:
                candidate.arrival = self.link.start(away)
                self._ahead.append(candidate)

    def _drop(self) -> None:
        with self._lock:
            for ticket in self._ahead:
                ticket.arrival = None
            self._ahead.clear()
            self._latest.clear()
            self._task = -1
