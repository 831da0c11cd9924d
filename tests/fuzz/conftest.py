"""A fixture for tests that count objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def few_objects() -> Iterator[None]:
    """Freeze the objects that exist before the test, so that each garbage collection looks only at the test's own."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
