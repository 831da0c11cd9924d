"""What single tests of ops ask for by name."""

from __future__ import annotations

import pytest

from hf_actcompress.reference import linear_cross_entropy


@pytest.fixture
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks of the loss head, so that tiny shapes take several."""
    monkeypatch.setattr(linear_cross_entropy, "MIN_CHUNK", 1)
    monkeypatch.setattr(linear_cross_entropy, "MAX_CHUNK", 1 << 12)
