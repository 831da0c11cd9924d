"""`python -m tests.sweep`: compare every pair, write the rows as they come, then the table and its summary."""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date
from functools import partial
from pathlib import Path

import torch
import transformers

from .catalogue import catalogue, model_class, types_without_a_class
from .flags import Work, with_flags
from .modes import BY_NAME, FLAG_MODES, MODES, Mode
from .pair import Row, sweep_pair
from .savings import by_type
from .table import HERE, merged, read_rows, write_results
from .workers import SECONDS, forked


def main() -> int:
    """Run it; the exit status is 1 if a pair failed."""
    options = _options()
    _quiet()
    modes = [BY_NAME[name] for name in options.modes] if options.modes else list(MODES)
    pairs = [pair for pair in catalogue() if re.search(options.only, pair.name)]
    if options.best:
        today = date.today().isoformat()
        best = {(r.type, r.model) for r in by_type(read_rows(options.out)).values() if r.measured != today}
        pairs = [pair for pair in pairs if (pair.type, pair.model) in best]
    work: list[Work] = [(pair, "", {}) for pair in pairs] if options.flags != "only" else []
    if options.flags != "no":
        work += with_flags(pairs)
    if options.sample is not None:
        random.Random(options.sample).shuffle(work)
    start = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = list(_run(_within(work, start, options.budget), len(work), modes, options))
    seconds = time.monotonic() - start
    if options.keep:
        rows, modes = merged(read_rows(options.out), rows), list(MODES)
    write_results(rows, options.out, types_without_a_class(), [m.name for m in modes], seconds)
    return int(any(row.failures for row in rows))


def _run(work: Iterator[Work], total: int, modes: list[Mode], options: argparse.Namespace) -> Iterator[Row]:
    """The rows as they come, also written to a file of lines."""

    def jobs() -> Iterator[tuple[Callable[[], Row], Row]]:
        for pair, flag, changed in work:
            with suppress(Exception):
                # the class is imported here once instead of in every worker
                model_class(pair)
            some = modes if not flag else [m for m in modes if m.name in FLAG_MODES]
            yield partial(sweep_pair, pair, some, changed, flag), Row(pair.type, pair.model, pair.task, flag)

    with (options.out / "rows.jsonl").open("w") as lines:
        for number, row in enumerate(forked(jobs(), options.jobs, options.seconds), 1):
            lines.write(json.dumps(row.to_dict()) + "\n")
            lines.flush()
            _say(row, number, total)
            yield row


def _within(work: list[Work], start: float, budget: float) -> Iterator[Work]:
    for item in work:
        if time.monotonic() - start > budget:
            return
        yield item


def _quiet() -> None:
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)


def _say(row: Row, done: int, total: int) -> None:
    state = f"skipped: {row.skipped}" if row.skipped else f"{len(row.passed)} passed, {len(row.failures)} failed"
    print(f"[{done}/{total}] {row.type}/{row.model} {row.flag} {state} ({row.seconds} s)", flush=True)
    for mode, failures in row.failures.items():
        print(f"    {mode}: {failures[0]}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("--only", default="", help="a regular expression on type/class")
    parser.add_argument(
        "--best", action="store_true", help="of each type the class alone that OUT says saves most, once a day"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--modes", nargs="+", choices=sorted(BY_NAME), help="the modes to run; all if not given")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit for each pair")
    parser.add_argument(
        "--flags", choices=("no", "too", "only"), default="no", help="flags of configs off their defaults"
    )
    parser.add_argument("--out", type=Path, default=HERE, help="where the table is written")
    parser.add_argument("--sample", type=int, help="a seed: the pairs in a random order")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no pair is started")
    parser.add_argument("--keep", action="store_true", help="rows of OUT stay where a pair is not run again")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
