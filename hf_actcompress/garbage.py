"""Python's garbage collections, which go through every object that an import has made: over a million with torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """The interpreter collects no garbage by itself while the block runs."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Keep imported objects out of garbage collections, of which each measurement and estimate runs several.

    Garbage that is there already stays until the end: to collect it takes longer than many estimates.
    """
    if gc.get_freeze_count():
        # the caller has frozen objects, and unfreezes them itself
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
