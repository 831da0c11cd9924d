"""The table that is committed, and its summary."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

from . import savings
from .pair import Row

HERE = Path(__file__).parent / "results"


def write_results(rows: list[Row], out: Path, without_class: list[str], modes: list[str], seconds: float) -> None:
    """`sweep.json` with a line for each pair, `summary.md` and `savings.md`."""
    lines = ",\n".join(json.dumps(compact(row)) for row in rows)
    head = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "modes": modes,
        "seconds": round(seconds),
        "types_without_a_class": without_class,
        "counts": counts(rows),
    }
    text = json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n' + lines + "\n]}\n"
    (out / "sweep.json").write_text(text)
    (out / "summary.md").write_text(summary(rows, head))
    (out / "savings.md").write_text(savings.table(rows))


def read_rows(out: Path) -> list[Row]:
    """The rows of an earlier run; none if there was none."""
    table = out / "sweep.json"
    return [Row(**row) for row in json.loads(table.read_text())["rows"]] if table.exists() else []


def merged(old: list[Row], new: list[Row]) -> list[Row]:
    """The old rows, with new ones in the places of the same pairs, and rows of new pairs at the end.

    If a pair was run in fewer modes than before, its verdicts in the other modes stay.
    """

    def key(row: Row) -> tuple[str, str, str]:
        return row.type, row.model, row.flag

    before = {key(row): row for row in old}
    return list({**before, **{key(row): _with_other_modes(row, before.get(key(row))) for row in new}}.values())


def _with_other_modes(row: Row, before: Row | None) -> Row:
    if before is None or row.skipped:
        return row
    run = {*row.passed, *row.left_out, *row.failures}
    for field in ("passed", "bit_equal", "tolerance"):
        getattr(row, field).extend(mode for mode in getattr(before, field) if mode not in run)
    for field in ("left_out", "failures"):
        getattr(row, field).update({k: v for k, v in getattr(before, field).items() if k not in run})
    return row


def compact(row: Row) -> dict[str, Any]:
    """A row without its empty fields."""
    full = row.to_dict()
    return {k: v for k, v in full.items() if v not in ("", [], {}, None)}


def counts(rows: list[Row]) -> dict[str, int]:
    compared = [row for row in rows if not row.skipped and (row.passed or row.failures)]
    return {
        "types": len({row.type for row in compared}),
        "pairs": len({(row.type, row.model) for row in compared}),
        "flags": sum(bool(row.flag) for row in compared),
        "modes passed": sum(len(row.passed) for row in compared),
        "modes bit-equal": sum(len(row.bit_equal) for row in compared),
        "modes left out": sum(len(row.left_out) for row in compared),
        "modes failed": sum(len(row.failures) for row in compared),
        "pairs with a failure": sum(bool(row.failures) for row in compared),
        "pairs skipped": sum(bool(row.skipped) for row in rows),
    }


def summary(rows: list[Row], head: dict[str, Any]) -> str:
    """The counts, the failures and the reasons for what was skipped."""
    out = ["# The sweep over model types", ""]
    out.append(f"torch {head['torch']}, transformers {head['transformers']}, {head['seconds']} s in one process.")
    out += ["", "| what | count |", "|---|---|"]
    out += [f"| {name} | {number} |" for name, number in head["counts"].items()]
    out += savings.summary(rows)
    out += ["", "| mode | passed | of them bit-equal | left out | failed |", "|---|---|---|---|---|"]
    for mode in head["modes"]:
        lists = [row.passed for row in rows], [row.bit_equal for row in rows]
        numbers = [sum(mode in names for names in each) for each in lists]
        numbers += [
            sum(mode in names for names in each) for each in ([r.left_out for r in rows], [r.failures for r in rows])
        ]
        out.append(f"| {mode} | {' | '.join(map(str, numbers))} |")
    out += ["", "## Failures", "", "| type | class | flag | mode | what |", "|---|---|---|---|---|"]
    for row in rows:
        for mode, failures in row.failures.items():
            text = failures[0].replace("|", "/")[:200]
            out.append(f"| {row.type} | {row.model} | {row.flag} | {mode} | {text} |")
    out += ["", "## Skipped", "", "| type | class | why |", "|---|---|---|"]
    for row in rows:
        if row.skipped:
            out.append(f"| {row.type} | {row.model} | {row.skipped.replace('|', '/')[:200]} |")
    out += ["", "## Why modes were left out", "", "| mode | reason | pairs |", "|---|---|---|"]
    reasons = Counter(
        (mode, reason.replace(row.model, "the class").replace("|", "/")[:120])
        for row in rows
        for mode, reason in row.left_out.items()
    )
    out += [f"| {mode} | {reason} | {number} |" for (mode, reason), number in reasons.most_common(60)]
    return "\n".join(out) + "\n"
