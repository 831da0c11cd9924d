"""As in tests/memory: collections leave out what the imports made."""

from __future__ import annotations

from tests.memory.conftest import _frozen_imports

__all__ = ["_frozen_imports"]
