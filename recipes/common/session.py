"""Runs commands one after the other, each with a time limit, and keeps their files in an archive."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# the archive is made anew if it is older than this
SECONDS_BETWEEN_ARCHIVES = 5.0
# for a job that is interrupted
SECONDS_TO_END = 4.0


@dataclass(frozen=True)
class Job:
    """A command for this Python below the repository's root, without the options that all jobs share.

    Attributes:
        seconds: The time limit, after which it is stopped.
        shared: Whether it takes the options that all jobs share (device, sizes, folder).
        rehearsed: The command to run instead where there is no GPU, if it differs.
        timed: Whether it measures time, so that nothing may run beside it.
    """

    name: str
    command: tuple[str, ...]
    seconds: int
    shared: bool = True
    rehearsed: tuple[str, ...] = ()
    timed: bool = True


@dataclass(frozen=True)
class Ended:
    """How a job ended. `status` is the exit status, or None if it was stopped or not started."""

    name: str
    command: str
    limit: float
    took: float
    status: int | None
    ending: str

    @property
    def ok(self) -> bool:
        return self.ending == "ok"

    def record(self) -> dict[str, object]:
        return {**asdict(self), "ok": self.ok}


class Archive:
    """The files of a folder in one compressed archive, which stays whole if the process is killed."""

    def __init__(self, folder: Path, path: Path) -> None:
        self.folder, self.path = folder, path
        self._seen: dict[Path, int] = {}
        self._made = 0.0
        self._lock = threading.Lock()

    def refresh(self, now: bool = False) -> None:
        """Make the archive again if a file has changed since, and the last archive is old enough."""
        with self._lock:
            self._refresh(now)

    def _refresh(self, now: bool) -> None:
        if not now and time.monotonic() - self._made < SECONDS_BETWEEN_ARCHIVES:
            return
        self._made = time.monotonic()
        files = {path: path.stat().st_mtime_ns for path in self._files()}
        if files == self._seen:
            return
        beside = self.path.with_name(f".{self.path.name}.new")
        with tarfile.open(beside, "w:gz", compresslevel=3) as archive:
            for path in files:
                # Read whole before it is added: a job may be writing it, and tarfile fails over a file that shrinks.
                text = path.read_bytes()
                entry = tarfile.TarInfo(str(path.relative_to(self.folder.parent)))
                entry.size, entry.mtime = len(text), files[path] // 10**9
                archive.addfile(entry, io.BytesIO(text))
        os.replace(beside, self.path)
        self._seen = files

    def _files(self) -> list[Path]:
        wanted = self.path.name, f".{self.path.name}.new"
        return sorted(p for p in self.folder.rglob("*") if p.is_file() and p.name not in wanted)


def run(job: Job, command: Sequence[str], log: Path, limit: float, site: Path | None, archive: Archive) -> Ended:
    """Run a command for this Python; its output goes to the log, and the archive is kept fresh meanwhile."""
    began = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT, env=environment(site), stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            while process.poll() is None and time.monotonic() - began < limit:
                time.sleep(0.1)
                archive.refresh()
        finally:
            cut_off = process.poll() is None
            if cut_off:
                _interrupt(process)
            _kill(process)
    status = None if cut_off else process.returncode
    ending = "cut off" if cut_off else "ok" if status == 0 else f"exit status {status}"
    took = round(time.monotonic() - began, 1)
    return Ended(job.name, shlex.join(["python", *command]), round(limit, 1), took, status, ending)


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """Give the process a few seconds to say what it has found so far, as pytest does of tests that have failed."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS_TO_END)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and all that it started, because test workers and compilers would disturb the next job."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment(site: Path | None) -> dict[str, str]:
    """The environment of a job: it imports the package from this checkout, and peers from the unpacked wheels."""
    before = os.environ.get("PYTHONPATH", "")
    folders = [str(ROOT), *([str(site)] if site else []), *([before] if before else [])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folders),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def unpack_wheels(folder: Path, site: Path) -> None:
    """Unpack the wheels of a folder to where jobs find them. It needs no network and changes no environment."""
    wheels = sorted(str(path) for path in folder.glob("*.whl"))
    if not wheels:
        raise SystemExit(f"--wheels {folder}: there is no .whl file in it")
    options = ["--no-index", "--no-deps", "--no-compile", "--upgrade", "--quiet", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *wheels], check=True)
