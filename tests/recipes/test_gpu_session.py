"""The command for a lent GPU: what it would run can be run, and it ends in time."""

import importlib
from pathlib import Path
from typing import Any

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(RECIPES))
    return importlib.import_module("gpu_session")


def test_the_limits_of_all_jobs_are_nine_minutes(session: Any) -> None:
    assert sum(job.seconds for job in session.JOBS) <= 9 * 60
    assert len({job.name for job in session.JOBS}) == len(session.JOBS)


def test_every_job_asks_for_what_there_is(session: Any) -> None:
    for job in session.JOBS:
        recipe, *options = job.command
        if recipe.endswith(".py"):
            module = importlib.import_module(Path(recipe).stem)
            # argparse ends the process over an unknown model, mode or option
            assert module.parse_args([*options, "--device", "cpu"])
