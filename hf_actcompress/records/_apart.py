"""Trying a module while a forward is in progress: the trial and the forward must not see each other's records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ._current import current
from .registry import another_registry


@contextmanager
def apart() -> Iterator[None]:
    """While the block runs, this thread has no frame, no net, no selective call and no watcher."""
    before = dict(vars(current))
    current.__init__()  # type: ignore[misc]
    try:
        with another_registry():
            yield
    finally:
        vars(current).update(before)
