"""The code in UPSTREAM.md prints the output that is given below it, under the versions that it was written for."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "tests" / "UPSTREAM.md").read_text()
LIBRARIES = ("torch", "transformers", "peft")


def _drafts() -> list[tuple[str, str, str]]:
    """For each draft its title, its code and what the code prints."""
    sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
    blocks = [re.findall(r"^```(?:python|text)\n(.*?)^```", section, re.M | re.S) for section in sections]
    return [(section.partition("\n")[0], *pair) for section, pair in zip(sections, blocks, strict=True)]


def _other_version() -> str | None:
    """The reason why the output may differ here, such as a library of another version than in constraints.txt."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for name in LIBRARIES:
        try:
            found = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            return f"{name} is not installed"
        if found != pins[name]:
            return f"{name} is {found}, the drafts were written for {pins[name]}"
    return "a CUDA toolkit may build what fails on a CPU" if torch.cuda.is_available() else None


@pytest.mark.daily(3)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("code", "printed"), [pytest.param(*rest, id=title) for title, *rest in _drafts()])
def test_code_prints_what_is_said(code: str, printed: str) -> None:
    reason = _other_version()
    if reason is not None:
        pytest.skip(reason)
    # the reader of a draft would run its code in a new process, too
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == printed, done.stderr


def test_every_draft_says_what_would_help() -> None:
    assert TEXT.count("\nWhat would help: ") == len(_drafts()) > 0
