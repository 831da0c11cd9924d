"""Every measurement collects garbage before and after; what the imports made is left out of that."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _frozen_imports() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
