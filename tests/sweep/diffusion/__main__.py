"""`python -m tests.sweep.diffusion`: compare every class of diffusers, and write the table."""

from __future__ import annotations

import argparse
import json
import logging
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from ..pair import Row
from ..table import HERE
from ..workers import forked
from . import table
from .case import sweep_class
from .classes import PACKAGES, classes
from .overrides import SKIPPED
from .ways import BY_NAME, WAYS


def main() -> int:
    """Run it; the exit status is 1 if a class failed."""
    options = _options()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows = list(_rows(options))
    found = {name for package in PACKAGES for name in classes(package)}
    if options.keep:
        done = {row.model for row in rows}
        rows += [
            row for row in table.read(options.out) if row.model not in done and row.model in found - SKIPPED.keys()
        ]
    table.write(rows, {name: why for name, why in SKIPPED.items() if name in found}, options.out)
    return int(any(row.failures for row in rows))


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    ways = [BY_NAME[name] for name in options.ways] if options.ways else list(WAYS)
    pairs = [(package, cls) for package in PACKAGES for name, cls in classes(package).items() if name not in SKIPPED]
    pairs = [(package, cls) for package, cls in pairs if re.search(options.only, cls.__name__)]
    jobs = ((partial(sweep_class, package, cls, ways), Row(package, cls.__name__)) for package, cls in pairs)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / f"{table.NAME}.jsonl").open("w") as lines:
        for number, row in enumerate(forked(jobs, options.jobs, options.seconds), 1):
            lines.write(json.dumps(row.to_dict()) + "\n")
            lines.flush()
            kept = ", ".join(f"{name} {share:.0%}" for name, share in row.kept.items())
            print(f"[{number}/{len(pairs)}] {row.model} ({row.seconds} s) {kept}", flush=True)
            for way, failures in row.failures.items():
                print(f"    {way}: {failures[0]}", flush=True)
            yield row


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sweep.diffusion", description=__doc__)
    parser.add_argument("--only", default="", help="a regular expression on the class's name")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--ways", nargs="+", choices=sorted(BY_NAME), help="the ways to run; all if not given")
    parser.add_argument("--seconds", type=float, default=240, help="limit of processor time for each class")
    parser.add_argument("--out", type=Path, default=HERE, help="where the table is written")
    parser.add_argument("--keep", action="store_true", help="rows of OUT stay where a class is not run again")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
