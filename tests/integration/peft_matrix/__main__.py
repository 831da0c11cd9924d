"""Runs the matrix and writes its tables: `python -m tests.integration.peft_matrix [--method NAME] [--subject NAME]`.

The whole matrix takes some ten minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, fields
from pathlib import Path

import torch

from .cells import PLAYS, SKIPPED, Row, run_cell
from .methods import BY_METHOD
from .scenarios import SCENARIOS
from .side import ORDERS
from .subjects import BY_SUBJECT, SUBJECTS

RESULTS = Path(__file__).parent / "results"
# the table is written after so many jobs, so an interrupted run loses no more than these
WRITTEN_EVERY = 10
Job = tuple[str, str, tuple[tuple[str, str], ...]]


def run_job(job: Job) -> list[Row]:
    """The scenarios of one method on one model."""
    torch.set_num_threads(1)
    method, subject, plays = BY_METHOD[job[0]], BY_SUBJECT[job[1]], job[2]
    return [row for scenario, mode in plays for row in run_cell(method, subject, scenario, mode)]


def summary(rows: Sequence[Row]) -> dict[str, int]:
    """The number of rows with each status."""
    return dict(sorted(Counter(row.status for row in rows).items()))


def _cell(rows: Sequence[Row]) -> str:
    """The text for one method and one model in the markdown table."""
    bad = Counter(row.status for row in rows if not row.good and row.status not in SKIPPED)
    if bad:
        return ", ".join(f"**{count} {status}**" for status, count in sorted(bad.items()))
    good = Counter(row.status for row in rows if row.good)
    if good:
        return ", ".join(f"{count} {status}" for status, count in sorted(good.items()))
    return rows[0].status if rows else ""


def markdown(rows: Sequence[Row]) -> str:
    """One line per method, one column per model; failures are listed below."""
    import peft
    import transformers

    names = [subject.name for subject in SUBJECTS]
    lines = [
        "# PEFT methods on patched models",
        "",
        f"PEFT {peft.__version__}, transformers {transformers.__version__}, torch {torch.__version__}. "
        "Written by `python -m tests.integration.peft_matrix`.",
        "",
        ", ".join(f"{count} {status}" for status, count in summary(rows).items()) + ".",
        "",
        "Equal: the same bits as stock in every step. Close: within 1e-5 of stock's L2 norm (bf16: 2e-2), or "
        "as near to fp64 as stock is. Refused: an error that names the order to use. PEFT refuses: stock raises too.",
        "",
        f"| method | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    for method in BY_METHOD:
        cells = [_cell([row for row in rows if row.method == method and row.subject == name]) for name in names]
        if any(cells):
            lines.append(f"| {method} | {' | '.join(cells)} |")
    failures = [row for row in rows if not row.good and row.status not in SKIPPED]
    lines += ["", "## Failures", ""]
    lines += [
        f"- {r.method}, {r.subject}, {r.scenario}, {r.mode}, {r.order}: {r.status}: {r.detail}" for r in failures
    ] or ["None."]
    lines += ["", "## Not run", ""]
    skipped = Counter((r.method, r.subject, r.status, r.detail) for r in rows if r.status in SKIPPED)
    lines += [f"- {m}, {s}: {status} in {n} cells: {detail}" for (m, s, status, detail), n in skipped.items()]
    return "\n".join(lines) + "\n"


def _key(row: Row) -> tuple[int, ...]:
    """The sort key of a row in the tables."""
    places = (list(BY_METHOD), list(BY_SUBJECT), [*PLAYS], [*ORDERS])
    values: tuple[object, ...] = (row.method, row.subject, (row.scenario, row.mode), row.order)
    return tuple(names.index(value) for names, value in zip(places, values, strict=True))


def read(folder: Path) -> list[Row]:
    """The rows of an earlier run, without those that the matrix no longer has."""
    file = folder / "peft_matrix.json"
    rows = [Row(*row) for row in json.loads(file.read_text())["rows"]] if file.exists() else []
    return [row for row in rows if row.method in BY_METHOD and (row.scenario, row.mode) in PLAYS]


def write(folder: Path, rows: Sequence[Row]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    ordered = sorted(rows, key=_key)
    lines = ",\n".join(json.dumps(astuple(row)) for row in ordered)
    columns = json.dumps([field.name for field in fields(Row)])
    (folder / "peft_matrix.json").write_text(f'{{"columns": {columns}, "rows": [\n{lines}\n]}}\n')
    (folder / "peft_matrix.md").write_text(markdown(ordered))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", action="append", choices=BY_METHOD, help="only this one (may be repeated)")
    parser.add_argument("--subject", action="append", choices=BY_SUBJECT, help="only this one (may be repeated)")
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="only this one (may be repeated)")
    parser.add_argument("--update", action="store_true", help="keep the rows of the table that are not run now")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    plays = tuple(play for play in PLAYS if play[0] in (args.scenario or SCENARIOS))
    jobs = [(m, s, plays) for m in BY_METHOD for s in BY_SUBJECT if m in (args.method or BY_METHOD)]
    jobs = [job for job in jobs if job[1] in (args.subject or BY_SUBJECT)]
    rows = {_key(row): row for row in (read(args.output) if args.update else ())}
    with multiprocessing.get_context("fork").Pool(args.processes, maxtasksperchild=40) as pool:
        for done, found in enumerate(pool.imap(run_job, jobs), start=1):
            rows |= {_key(row): row for row in found}
            print(f"{done}/{len(jobs)} {found[0].method}, {found[0].subject}: {summary(found)}", flush=True)
            if done % WRITTEN_EVERY == 0 or done == len(jobs):
                write(args.output, list(rows.values()))
    print(summary(list(rows.values())))


if __name__ == "__main__":
    main()
