"""The command that runs a subset of the tests for other versions: its files, its rows, and its own environment."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import corners


@pytest.mark.parametrize("subset", corners.NAMES, ids=corners.NAMES.values())
def test_a_subset_names_files(subset: tuple[str, ...]) -> None:
    found = corners._found(subset)
    assert len(found) >= len(subset) and all(Path(path).exists() for path in found)
    with pytest.raises(SystemExit, match="no file matches"):
        corners._found(["test_nowhere.py"])


def test_a_row_replaces_that_of_the_same_versions_and_files() -> None:
    old = {"torch": "2.11.0", "transformers": "5.17.0", "passed": 1}
    rows: list[dict[str, Any]] = [old]
    for files, passed in (("newest", 2), ("corner", 3), ("newest", 4)):
        rows = corners.with_row(rows, {**old, "files": files, "passed": passed})
    assert [(row["files"], row["passed"]) for row in rows] == [("corner", 3), ("newest", 4)]


def test_a_run_adds_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []

    def run(options: list[str], plugins: list[corners.Counts]) -> None:
        called.append(options)
        plugins[0].outcomes["passed"] += 5

    monkeypatch.setattr(pytest, "main", run)
    options = ["--files", "test_house.py", "--processes", "2", "--out", str(tmp_path)]
    assert corners.main(options) == 0
    assert called[0][-3:] == ["-n", "2", str(corners.HERE / "test_house.py")]
    (row,) = json.loads((tmp_path / "corners.json").read_text())
    assert (row["torch"], row["files"], row["days"], row["passed"]) == (torch.__version__, "test_house.py", "all", 5)
    assert f"| {torch.__version__} |" in (tmp_path / "corners.md").read_text()


def test_the_newest_packages_come_with_this_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No command of pip may choose a torch, and no file pins the rest."""
    commands: list[list[str]] = []
    environments: list[dict[str, str]] = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> argparse.Namespace:
        commands.append(command)
        environments.append(env)
        return argparse.Namespace(returncode=1)

    monkeypatch.setattr(corners.venv, "create", lambda *_, **__: None)
    monkeypatch.setattr(corners.subprocess, "run", run)
    monkeypatch.setenv("PYTHONPATH", "/an/older/transformers")
    monkeypatch.chdir(tmp_path)
    assert corners.main(["--newest", "--out", "here"]) == 1
    *installed, ran = commands
    assert len(installed) == 2 and ".[test]" in installed[1] and "-U" in installed[1]
    for command in installed:
        assert f"torch=={torch.__version__}" in command and not {"-c", "--constraint"} & set(command)
    assert {command[0] for command in commands} != {corners.sys.executable}
    assert not any("PYTHONPATH" in env for env in environments)
    assert ran[1:3] == ["-m", "tests.corners"] and ran[-len(corners.NEWEST) :] == list(corners.NEWEST)
    assert ran[3:9] == ["--days", "1", "--processes", "2", "--out", str(tmp_path / "here")]
