"""Every test starts with one thread, a fixed seed and an empty registry, so that its numbers can be repeated."""

from __future__ import annotations

import datetime
import gc
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# without a GPU, kernels run in Triton's interpreter; Triton reads the variable when it is imported
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# in a test, measured times must not decide which implementation runs
os.environ.setdefault("HF_ACTCOMPRESS_TIMING", "0")
# Inductor's folder is not safe for several processes: one of them can load a library that another has half written
WORKERS_FOLDER = tempfile.mkdtemp(prefix="inductor_") if "PYTEST_XDIST_WORKER" in os.environ else ""
if WORKERS_FOLDER:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = WORKERS_FOLDER

from hf_actcompress.records import clear  # noqa: E402

torch.set_num_threads(1)

FOLDER = Path(__file__).parent
# of the tests in these folders, whose models are traced anew in each test, one in so many runs each day; on top of
# the marks `daily(n)`
SHARES: dict[str, int] = {
    **dict.fromkeys(("integration", "layers", "memory", "models"), 4),
    **dict.fromkeys(("cli", "codecs", "fuzz", "kernels", "modules", "ops", "quick", "recipes", "records", "sweep"), 2),
}


@pytest.fixture(autouse=True, scope="module")
def _frozen_imports() -> Iterator[None]:
    """Keep the objects that exist by now, most of them made by imports, out of garbage collections in this module.

    Every measurement of bytes collects garbage before and after. Without this, each takes over a second longer.
    """
    gc.collect()
    gc.freeze()
    yield


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    clear()
    compilers = {name: os.environ.get(name) for name in ("CC", "CXX")}
    yield
    clear()
    # PEFT leaves "gcc" in both when it cannot build BOFT's kernel: Inductor would then link without the C++ library
    for name, value in compilers.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def pytest_configure(config: pytest.Config) -> None:
    # xdist's processes inherit the environment, so all of them run the cases of one day, even past midnight
    os.environ.setdefault("CASES_OF_DAY", str(datetime.datetime.now(datetime.UTC).date().toordinal()))
    # os.devnull cannot be a folder: no test reads an answer of `estimate` that another test or the user has stored
    os.environ["ACTCOMPRESS_CACHE"] = os.devnull
    if any(not Path(argument).is_dir() for argument in config.args):
        # if the command names a file or a test, all of its cases run
        os.environ.setdefault("ALL_CASES", "1")


def pytest_unconfigure() -> None:
    # without this, libraries find their objects alive when the interpreter ends, and print messages
    gc.unfreeze()
    if WORKERS_FOLDER:
        shutil.rmtree(WORKERS_FOLDER, ignore_errors=True)


def pytest_report_header() -> str:
    if os.environ.get("ALL_CASES"):
        return "cases: all"
    return f"cases: those of day {os.environ['CASES_OF_DAY']}; all with ALL_CASES=1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_out_other_days(config, items)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def _leave_out_other_days(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases that do not run today: each case runs on one day in n, by its folder and its `daily(n)`.

    With `DAYS=m` those of m days run.
    """
    if os.environ.get("ALL_CASES"):
        return
    day, days = int(os.environ["CASES_OF_DAY"]), int(os.environ.get("DAYS", "1"))
    left_out = [item for item in items if (zlib.crc32(item.nodeid.encode()) + day) % _one_in(item) >= days]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _one_in(item: pytest.Item) -> int:
    """On one day in how many a case runs."""
    folder = item.path.relative_to(FOLDER).parts[0]
    mark = item.get_closest_marker("daily")
    return SHARES.get(folder, 1) * (1 if mark is None else mark.args[0])
