"""The verdicts, the table and the picture of recipes/reproduce.py."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .drawing import EXACT, LOSSY, STOCK, head, plain, reference, save
from .papers import UNITS, Claim

# our way, what failed, and what says nothing
_COLOURS = (EXACT, LOSSY, STOCK)
VERDICTS = ("reproduced", "not reproduced", "not comparable here")
COLUMNS = ("method", "claim", "source", "our setting", "claimed", "ours", "exact alone", "CPU s", "verdict")


@dataclass(frozen=True)
class Row:
    """One measured claim.

    `seconds` is processor time, which other processes do not change. `exact` is what the preset `exact`, on which the
    other presets build, saves by itself; None if it has no share in `ours`.
    """

    paper: str
    title: str
    claim: str
    source: str
    setting: str
    unit: str
    claimed: float
    ours: float
    verdict: str
    reason: str
    command: str
    seconds: float | None = None
    exact: float | None = None


def verdict(claim: Claim, ours: float) -> tuple[str, str]:
    """One of VERDICTS, and the reason, or what else a reader has to know. A NaN reproduces nothing."""
    if claim.incomparable:
        return VERDICTS[2], claim.incomparable
    if ours >= UNITS[claim.unit].enough(claim.figure):
        return VERDICTS[0], claim.reason
    return VERDICTS[1], claim.reason or "the cause is not known"


def readable(value: float, unit: str) -> str:
    """A figure as the table shows it; a share that grew instead of shrinking has the opposite sign."""
    row = UNITS[unit]
    text = row.form.format(row.factor * value)
    return text.replace("--", "+")


def markdown(rows: Sequence[Row], about: dict[str, Any]) -> str:
    """The commands, the machine and one table."""
    commands = dict.fromkeys(f"`{row.command}`" for row in rows)
    lines = [", ".join(commands), "", f"{about['device']}, {about['threads']} threads, torch {about['torch']}, "]
    lines[-1] += f"transformers {about['transformers']}, hf-actcompress {about['hf-actcompress']}"
    lines += ["", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in rows:
        figures = [readable(value, row.unit) for value in (row.claimed, row.ours)]
        figures.append("" if row.exact is None else readable(row.exact, row.unit))
        said = f"{row.verdict}: {row.reason}" if row.reason else row.verdict
        cells = [row.title, row.claim, row.source, row.setting, *figures, f"{row.seconds or math.nan:.0f}", said]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _names(rows: Sequence[Row]) -> list[str]:
    """The method and what it claims; the subject of our setting too, where that is one of several."""
    names = [f"{row.title}, {readable(row.claimed, row.unit)}" for row in rows]
    subjects = [row.setting.partition(",")[0].rpartition(" of ")[2] for row in rows]
    return [
        f"{name} ({subject})" if names.count(name) > 1 else name for name, subject in zip(names, subjects, strict=True)
    ]


def plot(rows: Sequence[Row], path: Path, source: Path) -> bool:
    """Draw our figures relative to the claimed ones, a bar per claim; `source` holds them. False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.3 + 0.26 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for verdict_of, colour in zip(VERDICTS, _COLOURS, strict=True):
        places = [i for i, row in enumerate(rows) if row.verdict == verdict_of]
        drawn = axes.barh(places, [rows[i].ours / rows[i].claimed for i in places], color=colour, label=verdict_of)
        ours = [readable(rows[i].ours, rows[i].unit) for i in places]
        axes.bar_label(drawn, ours, padding=3, fontsize=8)
    axes.set_yticks(range(len(rows)), _names(rows))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.1)
    reference(axes, 1)
    axes.set_xlabel("our figure over the claimed one", fontsize=9)
    figure.legend(loc="outside lower center", ncols=len(VERDICTS), fontsize=8, frameon=False)
    plain(axes)
    head(figure, "Memory that papers claim to save (at the names), and what is measured here (at the bars)")
    save(figure, path, source)
    return True
