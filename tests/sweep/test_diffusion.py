"""The sweep over diffusers' classes: what was wrong once, some classes of the day, and that the table has all of them.

Args (environment): SWEEP_SEED draws another sample than the day's; SWEEP_SECONDS makes it longer or shorter.
"""

from __future__ import annotations

import datetime
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sweep.compare import Step
from tests.sweep.step import Outcome

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("peft")

from tests.sweep.diffusion import table  # noqa: E402
from tests.sweep.diffusion.case import LOSSY, sweep_class, verdict_of  # noqa: E402
from tests.sweep.diffusion.classes import PACKAGES, classes  # noqa: E402
from tests.sweep.diffusion.given import INPUTS  # noqa: E402
from tests.sweep.diffusion.overrides import CONFIGS, SKIPPED  # noqa: E402
from tests.sweep.diffusion.ways import BY_NAME, WAYS  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).parents[2]
TABLE = json.loads((Path(__file__).parent / "results/diffusers.json").read_text())
CLASSES = {name: (package, cls) for package in PACKAGES for name, cls in classes(package).items()}
SEED = int(os.environ.get("SWEEP_SEED", datetime.date.today().timetuple().tm_yday))
SECONDS = float(os.environ.get("SWEEP_SECONDS", "6"))
# (class, way, what was wrong)
HISTORICAL = (
    ("AuraFlowTransformer2DModel", "fp32", "a gradient of the second stream that a block returned as none"),
    ("MotifVideoTransformer3DModel", "int8", "an output that was made again from a tensor in another order"),
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("name", "way", "what"), HISTORICAL)
def test_what_was_wrong_once(name: str, way: str, what: str) -> None:
    row = sweep_class(*CLASSES[name], [BY_NAME[way]])
    assert not row.failures, f"{name} ({what}): {row.failures}"
    assert row.passed == [way]


def test_some_classes_of_the_day() -> None:
    """As many classes as fit into the time, each in one way, in an order drawn from the day of the year."""
    draw = random.Random(SEED)
    names = sorted(row["model"] for row in TABLE["rows"] if row["seconds"] < 20 and row["model"] in CLASSES)
    draw.shuffle(names)
    start, compared = time.monotonic(), 0
    for name in names:
        way = draw.choice(WAYS)
        row = sweep_class(*CLASSES[name], [way])
        assert not row.failures, f"SWEEP_SEED={SEED}: {name}, {way.name}: {row.failures}"
        compared += len(row.passed)
        if time.monotonic() - start > SECONDS:
            break
    assert compared, f"SWEEP_SEED={SEED}: nothing was compared in {SECONDS} s"


def test_every_class_of_the_installed_diffusers_is_in_the_table_or_skipped_with_a_reason() -> None:
    compared = {row["model"] for row in TABLE["rows"]}
    new = sorted(CLASSES.keys() - compared - SKIPPED.keys())
    assert not new, f"run python -m tests.sweep.diffusion --keep --only '^({'|'.join(new)})$'"
    assert not compared & SKIPPED.keys() and all(SKIPPED.values()) and TABLE["skipped"] == SKIPPED
    if diffusers.__version__ == TABLE["diffusers"]:
        gone = (compared | SKIPPED.keys() | CONFIGS.keys() | INPUTS.keys()) - CLASSES.keys()
        assert not gone, f"diffusers has no such classes: {sorted(gone)}"


def test_the_table() -> None:
    """No class is wrong, and half of the classes keep at most 60% of stock's bytes."""
    assert TABLE["counts"]["classes with a failure"] == 0
    assert TABLE["saved"]["fp32"] >= 0.4
    text = (ROOT / "README.md").read_text()
    saved = table.medians(table.read(ROOT / "tests/sweep/results"))
    assert saved == TABLE["saved"]
    assert f"{TABLE['counts']['classes compared']} classes" in text
    assert f"median {saved['fp32']:.0%}, `int8` {saved['int8']:.0%}" in text


def _outcome(gradient: torch.Tensor, y: float = 1.0) -> Outcome:
    return Outcome({"sample": torch.full((3,), y)}, {"w": gradient})


def _no_step(patched: bool | None, trial: int) -> Any:
    raise AssertionError("a lossy preset is compared with stock's step alone")


@pytest.mark.parametrize(
    ("change", "y", "fails"),
    [
        (0.0, 1.0, False),
        (0.5 * LOSSY, 1.0, False),
        (2 * LOSSY, 1.0, True),
        (float("nan"), 1.0, True),
        (0.0, 1.01, True),
    ],
)
def test_a_lossy_preset_may_be_off_by_some_percent_in_gradients_alone(change: float, y: float, fails: bool) -> None:
    gradient, step = torch.ones(8), _no_step
    checked: Step = step
    seen = verdict_of(_outcome(gradient * (1 + change), y), _outcome(gradient), BY_NAME["int8"], checked)
    assert bool(seen.failures) == fails
