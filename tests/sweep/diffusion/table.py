"""The table that is committed: `diffusers.json` with a line for each class, and `diffusers.md`."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import diffusers
import torch

from ..pair import Row
from ..table import compact
from .ways import WAYS

NAME = "diffusers"


def write(rows: list[Row], skipped: dict[str, str], out: Path) -> None:
    rows = sorted(rows, key=lambda row: (row.type, row.model))
    head = {"torch": torch.__version__, "diffusers": diffusers.__version__, "counts": counts(rows, skipped)}
    head |= {"saved": medians(rows), "skipped": skipped}
    lines = ",\n".join(json.dumps(compact(row)) for row in rows)
    (out / f"{NAME}.json").write_text(json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n' + lines + "\n]}\n")
    (out / f"{NAME}.md").write_text(text(rows, skipped, head))


def read(out: Path) -> list[Row]:
    """The rows of an earlier run; none if there was none."""
    path = out / f"{NAME}.json"
    return [Row(**row) for row in json.loads(path.read_text())["rows"]] if path.exists() else []


def counts(rows: list[Row], skipped: dict[str, str]) -> dict[str, int]:
    failures = [texts for row in rows for texts in row.failures.values()]
    crashed = sum(any(text.startswith("exception") for text in texts) for texts in failures)
    return {
        "classes compared": sum(bool(row.passed or row.failures) for row in rows),
        "classes skipped": len(skipped),
        "ways passed": sum(len(row.passed) for row in rows),
        "of them bit-equal": sum(len(row.bit_equal) for row in rows),
        "of them compared without fp64": sum(len(row.tolerance) for row in rows),
        "ways left out": sum(len(row.left_out) for row in rows),
        "ways wrong": len(failures) - crashed,
        "ways crashed": crashed,
        "classes with a failure": sum(bool(row.failures) for row in rows),
    }


def medians(rows: list[Row]) -> dict[str, float]:
    """Of each way the median over classes of what is saved."""
    shares = {way.name: [1 - row.kept[way.name] for row in rows if way.name in row.kept] for way in WAYS}
    return {name: round(statistics.median(some), 3) for name, some in shares.items() if some}


def text(rows: list[Row], skipped: dict[str, str], head: dict[str, object]) -> str:
    days = sorted({row.measured for row in rows if row.measured})
    out = ["# The sweep over diffusers' models", ""]
    out += [
        f"torch {head['torch']}, diffusers {head['diffusers']}, {' to '.join(dict.fromkeys(days[:1] + days[-1:]))}:"
    ]
    out += ["`python -m tests.sweep.diffusion`. Tiny models on a CPU; a share is what a patched model keeps of stock's"]
    out += ["bytes between forward and backward, with a loss that keeps nothing.", "", "| what | count |", "|---|---|"]
    out += [f"| {name} | {number} |" for name, number in counts(rows, skipped).items()]
    saved = medians(rows)
    out += ["", "| | " + " | ".join(saved) + " |", "|---|" + "---|" * len(saved)]
    out += ["| saved, median over classes | " + " | ".join(f"{share:.0%}" for share in saved.values()) + " |"]
    names = [way.name for way in WAYS]
    out += ["", "Kept, of stock's bytes (`*`: gradients not stock's bit by bit, but as near to fp64):", ""]
    out += ["| package | class | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    out += [f"| {row.type} | {row.model} | " + " | ".join(_cell(row, name) for name in names) + " |" for row in rows]
    out += ["", "## Failures", "", "| class | way | what |", "|---|---|---|"]
    out += [f"| {r.model} | {way} | {_short(said[0])} |" for r in rows for way, said in r.failures.items()]
    out += ["", "## Ways left out", "", "| class | way | why |", "|---|---|---|"]
    out += [f"| {r.model} | {way} | {_short(why)} |" for r in rows for way, why in r.left_out.items()]
    out += ["", "## Skipped", "", "| class | why |", "|---|---|"]
    out += [f"| {name} | {_short(why)} |" for name, why in sorted(skipped.items())]
    return "\n".join(out) + "\n"


def _cell(row: Row, name: str) -> str:
    if name in row.failures:
        return "failed"
    mark = "" if name in row.bit_equal or name == "int8" else "*"
    return f"{row.kept[name]:.0%}{mark}" if name in row.kept else "–"


def _short(said: str) -> str:
    return said.replace("|", "/")[:200]
