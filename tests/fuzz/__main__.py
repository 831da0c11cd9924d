"""Random cases: `python -m tests.fuzz --cases 2000 --seed 1`; or one case: `--case 'family=bert mode=fp16'`."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import transformers
from hypothesis import HealthCheck, Phase, assume, given, seed, settings

from tests.fuzz.case import Case, cases, parse
from tests.fuzz.check import check, prepare, reduce
from tests.fuzz.compare import Failure


@dataclass
class Summary:
    """The result of a run: the cases that failed, grouped by the rule that they broke."""

    ran: int = 0
    drawn: set[Case] = field(default_factory=set)
    failed: dict[str, list[Case]] = field(default_factory=lambda: defaultdict(list))
    reduced: dict[str, Case] = field(default_factory=dict)

    def add(self, case: Case, failures: Sequence[Failure]) -> None:
        self.ran += 1
        for failure in failures:
            self.failed[failure.rule].append(case)

    def print(self) -> None:
        wrong = {case for found in self.failed.values() for case in found}
        print(f"\n{self.ran} cases, {len(wrong)} failed, {len(self.failed)} classes of failures")
        for rule, found in sorted(self.failed.items(), key=lambda item: -len(item[1])):
            print(f"\n{len(found)} times: {rule}\n  all with: {_common(found)}\n  families: {_families(found)}")
            print(f"  {reproduction(self.reduced.get(rule, found[0]))}")


def _common(found: Sequence[Case]) -> str:
    """The fields that all cases of a class have in common."""
    names = [f.name for f in fields(Case) if f.name != "seed"]
    shared = [n for n in names if len({getattr(case, n) for case in found}) == 1]
    return " ".join(f"{n}={getattr(found[0], n)}" for n in shared) or "nothing in common"


def _families(found: Sequence[Case]) -> str:
    return ", ".join(sorted({case.family for case in found}))


def reproduction(case: Case) -> str:
    """The command that runs one case."""
    return f"python -m tests.fuzz --case '{case}'"


def fuzz(count: int, start: int, *, quiet: bool = False, keep_going: bool = True) -> Summary:
    """Draw and check `count` cases. A failing one is printed and the run goes on; each class is reduced once."""
    summary, begin = Summary(), time.monotonic()

    @seed(start)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def run(case: Case) -> None:
        # hypothesis also makes variants of a case that it has drawn, and many of them are equal to it
        assume(case not in summary.drawn)
        summary.drawn.add(case)
        failures = check(case)
        new = [failure for failure in failures if failure.rule not in summary.failed]
        summary.add(case, failures)
        for failure in failures:
            print(f"FAILED {failure.rule}: {failure.detail}\n  {reproduction(case)}", flush=True)
        if new and keep_going:
            plain = reduce(case, new)
            summary.reduced.update({failure.rule: plain for failure in new})
            print(f"  reduced: {reproduction(plain)}", flush=True)
        if not quiet and summary.ran % 100 == 0:
            print(f"{summary.ran} cases, {time.monotonic() - begin:.0f} s", flush=True)

    run()
    return summary


def _in_processes(arguments: argparse.Namespace) -> int:
    """The cases divided among processes, each with a seed of its own."""
    each = -(-arguments.cases // arguments.jobs)
    commands = [
        [sys.executable, "-m", "tests.fuzz", "--cases", str(each), "--seed", str(arguments.seed + i)]
        for i in range(arguments.jobs)
    ]
    running = [subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}) for command in commands]
    return max(process.wait() for process in running)


def _one(text: str) -> int:
    failures = check(parse(text).tidy())
    for failure in failures:
        print(f"{failure.rule}: {failure.detail}")
    if not failures:
        print("no difference")
    return int(bool(failures))


def main() -> int:
    """Parse the command line and run. Returns the exit status: 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--case", help="run this one case")
    arguments = parser.parse_args()
    prepare()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    if arguments.case is not None:
        return _one(arguments.case)
    if arguments.jobs > 1:
        return _in_processes(arguments)
    print(f"seed {arguments.seed}")
    summary = fuzz(arguments.cases, arguments.seed)
    summary.print()
    return int(bool(summary.failed))


if __name__ == "__main__":
    sys.exit(main())
