"""A trial of a module while a forward is in progress: neither may see what the other declares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ._current import current
from .registry import another_registry


@contextmanager
def apart() -> Iterator[None]:
    """Inside, nothing is in progress: no frame, no net, no module that runs again, nobody who watches."""
    before = dict(vars(current))
    current.__init__()  # type: ignore[misc]
    try:
        with another_registry():
            yield
    finally:
        vars(current).update(before)
