"""A run that is killed with SIGKILL in the middle of a step and resumed ends where an uninterrupted one does."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.trainer_utils import get_last_checkpoint

from tests.families import BY_NAME, Family
from tests.fuzz.resume_worker import KILLED_IN, STEPS, make_model, make_trainer

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def _run_and_kill(family: Family, folder: Path) -> None:
    """Train in another process, and kill it as soon as it says that the step begins."""
    command = [sys.executable, "-m", "tests.fuzz.resume_worker", family.name, str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"step {KILLED_IN}"):
            process.kill()
            break
    assert process.wait(timeout=60) != 0, "the worker ended before it was killed"


def _resumed(model: Any, family: Family, folder: Path) -> dict[str, torch.Tensor]:
    trainer = make_trainer(model, family, folder)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    assert trainer.state.global_step == STEPS
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


def _differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


@pytest.mark.daily(3)
@pytest.mark.parametrize("name", ["bert", "gpt2-gelu-tanh"])
def test_killed_and_resumed(name: str, tmp_path: Path) -> None:
    """A patched and a stock model resume from the killed run's checkpoint, and end with an uninterrupted run's weights.

    This holds because the family's gradients are bit-equal to stock's.
    """
    family = BY_NAME[name]
    assert "fp32" in family.bit_equal
    whole = make_model(family, ours=True)
    make_trainer(whole, family, tmp_path / "whole").train()
    _run_and_kill(family, tmp_path / "killed")
    last = get_last_checkpoint(str(tmp_path / "killed"))
    assert last is not None and int(last.rpartition("-")[2]) < KILLED_IN
    # a resumed run writes checkpoints of its own
    shutil.copytree(tmp_path / "killed", tmp_path / "stock")
    for ours, folder in ((True, "killed"), (False, "stock")):
        weights = _resumed(make_model(family, ours=ours, seed=5), family, tmp_path / folder)
        assert not _differing(weights, whole.state_dict())
    assert _differing(dict(make_model(family, ours=False).state_dict()), whole.state_dict())
