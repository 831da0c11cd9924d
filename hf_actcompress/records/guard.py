"""`Guard` checks at the end of a backward whether it was right to keep only some of the rows."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from ..private_apis import at_end_of_backward, current_backward


class Guard:
    """Collects, while a backward runs, sizes that must be zero. They stay on their devices until it ends."""

    __slots__ = ("_found", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[int, dict[tuple[str, torch.device], Tensor]] = {}

    def fail(self, sizes: dict[str, float]) -> None:
        """Raise the error for these sizes, all of which are above zero."""
        raise NotImplementedError

    def note(self, what: str, size: Tensor) -> None:
        """Note a size [] that is above zero if something is wrong. For one name only the largest size counts."""
        task = current_backward()
        if task == -1:
            self._judge({(what, size.device): size})
            return
        with self._lock:
            if task not in self._found:
                self._found[task] = {}
                at_end_of_backward(lambda: self._look(task))
            found = self._found[task]
            before = found.get((what, size.device))
            found[what, size.device] = size if before is None else torch.maximum(before, size)

    def _look(self, task: int) -> None:
        with self._lock:
            found = self._found.pop(task, {})
        self._judge(found)

    def _judge(self, found: dict[tuple[str, torch.device], Tensor]) -> None:
        # the host waits for the device here, and nowhere else in a backward
        sizes = {what: value for (what, _), size in found.items() if (value := float(size)) > 0}
        if sizes:
            self.fail(sizes)
