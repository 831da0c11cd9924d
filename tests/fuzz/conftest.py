"""Fixtures of the tests that count objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def few_objects() -> Iterator[None]:
    """What was there before the test is no garbage of it: collecting after every op looks at its own objects alone."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
