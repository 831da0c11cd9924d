"""Fixtures for tests of single ops."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hf_actcompress.reference import logits_chunks
from hf_actcompress.reference.device_rules import under_rules
from tests.on_device import OnDevice


@pytest.fixture
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks of the loss head, so that tiny shapes take several."""
    for bound in ("MIN_CHUNK", "MIN_DEVICE_CHUNK"):
        monkeypatch.setattr(logits_chunks, bound, 1)
    monkeypatch.setattr(logits_chunks, "MAX_CHUNK", 1 << 12)
    monkeypatch.setattr(logits_chunks, "MAX_DEVICE_CHUNK", 1 << 12)


@pytest.fixture(params=("rows with a target", "all rows"))
def rows_computed(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which rows of the loss head are computed: on a CPU those with a target, on a GPU all."""
    with under_rules(None if request.param == "rows with a target" else OnDevice()):
        yield request.param
