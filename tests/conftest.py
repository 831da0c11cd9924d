"""One thread, fixed seeds, and a registry that starts empty: the same numbers on every machine."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# triton reads it when it is imported: without a GPU its kernels run in the interpreter
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hf_actcompress.records import clear  # noqa: E402

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
