"""`Guard`: whether a backward was right where fewer rows were kept than there are, looked at once when it ends."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from ..private_apis import at_end_of_backward, current_backward


class Guard:
    """Sizes of what must not be, noted while a backward runs. They stay on their devices until it ends."""

    __slots__ = ("_found", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[int, dict[tuple[str, torch.device], Tensor]] = {}

    def fail(self, sizes: dict[str, float]) -> None:
        """Raise the error of these notes, whose sizes are above zero."""
        raise NotImplementedError

    def note(self, what: str, size: Tensor) -> None:
        """Note a size [], above zero if something is wrong. The largest of its name counts."""
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
        # the one time in a backward that the host waits
        sizes = {what: value for (what, _), size in found.items() if (value := float(size)) > 0}
        if sizes:
            self.fail(sizes)
