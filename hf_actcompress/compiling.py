"""Whether the code that runs is traced for a compiler."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Traced(threading.local):
    on = False


_traced = _Traced()


def is_compiling() -> bool:
    """As `torch.compiler.is_compiling()`, which is one flag for all threads, and in `traced_for_compiler` too."""
    return torch.compiler.is_compiling() or _traced.on


@contextmanager
def traced_for_compiler() -> Iterator[None]:
    """Inside, and in this thread, `is_compiling()` holds: for code that this package traces for Inductor itself."""
    before, _traced.on = _traced.on, True
    try:
        yield
    finally:
        _traced.on = before
