"""Each pair in a process of its own, forked after the imports, with limits on time and memory."""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from .pair import Row

# of processor time, several times what the slowest pair takes; a busy machine may take PATIENCE times as long
SECONDS = 240
PATIENCE = 2
MEMORY = 6 << 30


@dataclass
class Worker:
    """A forked process that writes one row to a pipe."""

    pid: int
    pipe: int
    started: float
    row: Row
    read: bytes = b""


# a job, and the row that stands for it if it dies
Job = tuple[Callable[[], Row], Row]


def forked(jobs: Iterable[Job], parallel: int, seconds: float = SECONDS) -> Iterator[Row]:
    """Run the jobs; a job that dies or takes too long gives its empty row with the reason."""
    # the collector does not visit the parent's objects again, so that their pages stay shared
    gc.collect()
    gc.freeze()
    waiting = iter(jobs)
    running: list[Worker] = []
    try:
        while True:
            running += [_fork(job, seconds) for job in islice(waiting, parallel - len(running))]
            if not running:
                return
            yield from _finished(running, seconds)
    finally:
        gc.unfreeze()


def _finished(running: list[Worker], seconds: float) -> Iterator[Row]:
    """The rows of workers that have ended, which leave the list."""
    ready, _, _ = select.select([w.pipe for w in running], [], [], 1.0)
    for worker in list(running):
        done = worker.pipe in ready and _drained(worker)
        late = time.monotonic() - worker.started > PATIENCE * seconds
        if done or late:
            running.remove(worker)
            yield _ended(worker, late and not done)


def _fork(job: Job, seconds: float) -> Worker:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return Worker(pid, reading, time.monotonic(), job[1])
    os.close(reading)
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 5))
        text = json.dumps(job[0]().to_dict())
        with os.fdopen(writing, "w") as pipe:
            pipe.write(text)
    finally:
        # exit without cleaning up what belongs to the parent
        os._exit(0)


def _drained(worker: Worker) -> bool:
    chunk = os.read(worker.pipe, 1 << 16)
    worker.read += chunk
    return not chunk


def _ended(worker: Worker, late: bool) -> Row:
    row = worker.row
    if late:
        os.kill(worker.pid, signal.SIGKILL)
    os.close(worker.pipe)
    _, status = os.waitpid(worker.pid, 0)
    try:
        return Row(**json.loads(worker.read))
    except (ValueError, TypeError):
        code = os.waitstatus_to_exitcode(status)
        row.failures["worker"] = [f"exception: the worker {'took too long' if late else f'died ({code})'}"]
        row.seconds = round(time.monotonic() - worker.started, 1)
        return row
