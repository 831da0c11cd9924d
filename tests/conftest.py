"""One thread, fixed seeds, and a registry that starts empty: the same numbers on every machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hf_actcompress.records import clear

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    clear()
    yield
    clear()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
