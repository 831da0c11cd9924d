"""The command for a lent GPU: all of its jobs can be run, and its measurements are saved whenever it ends."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(RECIPES))
    return importlib.import_module("measure_on_gpu")


@pytest.fixture
def session(command: Any) -> Any:
    return importlib.import_module("common.session")


@pytest.mark.parametrize("options", (["--rehearse"], []), ids=("rehearsal", "session"))
def test_every_job_asks_for_what_there_is(command: Any, options: list[str], tmp_path: Path) -> None:
    assert len(set(command.NAMES)) == len(command.JOBS)
    args = command.parse_args(["--out", str(tmp_path), *options])
    for job in command.JOBS:
        recipe, *wanted = ["cpu" if word == "cuda" else word for word in command.command(job, args)]
        if recipe == "-m":
            assert all((ROOT / word).exists() for word in wanted if word.startswith("tests"))
            continue
        # argparse ends the process over an unknown model, mode or option
        assert importlib.import_module(Path(recipe).stem).parse_args(wanted)


def test_the_tests_that_need_a_gpu_are_found(command: Any) -> None:
    job = next(job for job in command.JOBS if job.name == "device-tests")
    assert "tests/memory/test_allocator.py" in job.command


def archived(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        texts = (member for member in archive if not member.name.endswith((".gz", ".png")))
        return {member.name: archive.extractfile(member).read().decode() for member in texts}  # type: ignore[union-attr]


COUNTING = """
import pathlib, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time, pathlib; time.sleep({1}); pathlib.Path('{0}/late').touch()"])
for i in range(1000):
    pathlib.Path('{0}/counts').write_text(str(i)); time.sleep(0.05)
"""


def test_a_job_that_is_cut_off_leaves_its_files_and_no_process(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "SECONDS_BETWEEN_ARCHIVES", 0.2)
    monkeypatch.setattr(session, "SECONDS_TO_END", 0.5)
    out = tmp_path / "out"
    out.mkdir()
    archive = session.Archive(out, tmp_path / "out.tar.gz")
    counted = 0
    for limit in (2.0, 10.0, 40.0):
        # a busy machine may take seconds to start a process
        code = ["-c", COUNTING.format(out, limit + 2)]
        ended = session.run(session.Job("counting", (), 1), code, out / "counting.log", limit, None, archive)
        assert not ended.ok and ended.ending == "cut off" and ended.status is None
        # nobody has asked for a last archive yet; a file that is just being written is empty
        counted = int(archived(tmp_path / "out.tar.gz").get("out/counts") or 0)
        if counted:
            break
    assert counted
    time.sleep(3.0)
    assert not (out / "late").exists(), "what the job started goes on after it"


def test_a_job_that_fails_says_how(session: Any, tmp_path: Path) -> None:
    archive = session.Archive(tmp_path, tmp_path / "a.tar.gz")
    ended = session.run(
        session.Job("no", (), 1), ["-c", "raise SystemExit(3)"], tmp_path / "no.log", 9.0, None, archive
    )
    assert ended.record() == {
        "name": "no", "command": "python -c 'raise SystemExit(3)'", "limit": 9.0, "took": ended.took, "status": 3,
        "ending": "exit status 3", "ok": False,
    }  # fmt: skip


def test_peers_come_from_a_folder_of_wheels(session: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no .whl"):
        session.unpack_wheels(tmp_path, tmp_path / "site")
    path = session.environment(tmp_path / "site")["PYTHONPATH"].split(os.pathsep)
    assert path[:2] == [str(ROOT), str(tmp_path / "site")]


def test_jobs_that_measure_no_time_run_side_by_side(
    command: Any, session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the two waits for the other's file; the one that measures time comes after both."""
    wait = "import pathlib, sys, time\nmine, other = map(pathlib.Path, sys.argv[1:])\nmine.touch()\n"
    wait += "while not other.exists(): time.sleep(0.05)"
    a, b, after = (str(tmp_path / name) for name in ("a", "b", "after"))
    checks = [session.Job(x, ("-c", wait, x, y), 60, shared=False, timed=False) for x, y in ((a, b), (b, a))]
    timed = session.Job("timed", ("-c", wait, after, a), 60, shared=False)
    jobs = tuple(replace(job, name=Path(job.name).name) for job in (timed, *checks))
    monkeypatch.setattr(command, "JOBS", jobs)
    monkeypatch.setattr(command, "NAMES", [job.name for job in jobs])
    out = tmp_path / "out"
    assert command.main(["--out", str(out), "--jobs", "a", "b", "timed"]) == 0
    ended = [job["name"] for job in json.loads((out / "session.json").read_text())["jobs"]]
    assert sorted(ended[:2]) == ["a", "b"] and ended[2] == "timed"
    args = command.parse_args(["--out", str(out), "--jobs", "a", "b", "timed", "--rehearse"])
    assert [[job.name for job in group] for group in command.groups(args)] == [["timed"], ["a"], ["b"]]


def test_what_time_has_run_out_for_is_named(command: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert command.main(["--rehearse", "--out", str(out), "--jobs", "kernels", "--minutes", "0.000001"]) == 1
    record = json.loads(archived(tmp_path / "out.tar.gz")["out/session.json"])
    assert [job["ending"] for job in record["jobs"]] == ["not started: time was up"]
    assert record["torch"] and record["command"].startswith("python recipes/measure_on_gpu.py --rehearse")
    assert set(record["missing"]) <= {"liger-kernel", "peft"}


@pytest.mark.daily(3)
@pytest.mark.slow
def test_a_session_that_is_killed_leaves_what_it_has_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, archive = tmp_path / "out", tmp_path / "results.tar.gz"
    job = "largest-bert-large-12GiB"
    options = ["--rehearse", "--out", str(out), "--archive", str(archive), "--jobs", "bert-base", job]
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(RECIPES / "measure_on_gpu.py"), *options],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    # in the middle of the second job
    first, end = f"out/{job}/benchmark.jsonl", time.monotonic() + 400
    try:
        while not (archive.exists() and first in archived(archive)):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.2)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    found = archived(archive)
    rows = {row["mode"]: row for row in map(json.loads, found["out/bert-base/benchmark.jsonl"].splitlines())}
    assert rows["exact"]["step_ms"] > 0 and rows["exact"]["peak_mib"] < rows["stock"]["peak_mib"]
    assert rows["exact"]["torch"] and rows["liger"]["note"]
    jobs = json.loads(found["out/session.json"])["jobs"]
    assert [(job["name"], job["ending"]) for job in jobs] == [("bert-base", "ok")]
    largest = json.loads(found[first].splitlines()[0])
    assert largest["mode"] == "stock" and largest["batch"] > 0
