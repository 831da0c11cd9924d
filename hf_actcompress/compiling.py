"""Whether code is traced in this thread: by a compiler, by this package for Inductor, or for the plan of a layer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


class _Tracing(threading.local):
    for_compiler = False
    plan = False


_tracing = _Tracing()


def is_compiling() -> bool:
    """As `torch.compiler.is_compiling()`, which is one flag for all threads, and in `traced_for_compiler` too."""
    return torch.compiler.is_compiling() or _tracing.for_compiler


def is_traced() -> bool:
    """Whether a patched module runs to be traced: by a compiler, or for the plan of a layer."""
    # not by `is_compiling`: this runs for each op
    return _tracing.plan or _tracing.for_compiler or torch.compiler.is_compiling()


def is_traced_plan() -> bool:
    """Whether a patched module runs to be traced for the plan of a layer."""
    return _tracing.plan


def traced_for_compiler() -> AbstractContextManager[None]:
    """Inside, and in this thread, `is_compiling()` holds: for code that this package traces for Inductor itself."""
    return _on("for_compiler")


def traced_plan() -> AbstractContextManager[None]:
    """Inside, modules run as they do for a compiler: their stock code, and marks."""
    return _on("plan")


@contextmanager
def _on(name: str) -> Iterator[None]:
    before = getattr(_tracing, name)
    setattr(_tracing, name, True)
    try:
        yield
    finally:
        setattr(_tracing, name, before)
