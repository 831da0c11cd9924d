"""The table and the picture of recipes/evaluate_presets.py."""

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .bf16 import WAYS
from .drawing import bars, colour_of, head, legend, plain, reference, save
from .papers import PAPERS

COLUMNS = (
    "preset",
    "kept, h",
    "of stock",
    "gradient error",
    "x bf16 autocast's",
    "x bf16 weights'",
    "cosine",
    "x step",
    "held-out loss",
    "against stock",
    "told apart",
)

# job -> its model
_MODELS = {"minilm": "MiniLM", "gpt2": "GPT-2-like", "llama": "Llama-like"}

# 97.5% quantiles of Student's t by degrees of freedom; above these the normal distribution's is used, up to 12% less
_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def interval(values: list[float]) -> float | None:
    """Half of the 95% confidence interval of the mean; None for a single value."""
    if len(values) < 2:
        return None
    return _T.get(len(values) - 1, 1.96) * statistics.stdev(values) / len(values) ** 0.5


def gaps_of(row: dict[str, Any], stock: dict[str, Any]) -> list[float]:
    """The row's losses minus stock's from the same seeds, in percent of stock's mean."""
    scale = statistics.mean(stock["losses"])
    # a lossless row was trained with the first seed only
    return [100 * (a - b) / scale for a, b in zip(row["losses"], stock["losses"], strict=False)]


def told_apart(gap: float, half: float | None) -> str:
    """Whether a mean difference from stock, in percent, lies outside of its confidence interval.

    A value that is printed as 0.00% is only rounding.
    """
    if half is None or abs(gap) <= max(half, 0.005):
        return ""
    return "worse" if gap > 0 else "better"


def ratios(errors: list[float], units: list[float]) -> str:
    """The median of errors in units of those of the same batches, and their range; empty for other batches."""
    if len(errors) != len(units):
        return ""
    values = [error / unit for error, unit in zip(errors, units, strict=True)]
    median, low, high = (f"{value:.2f}" for value in (statistics.median(values), min(values), max(values)))
    return median if low == high else f"{median} ({low} to {high})"


def _row(name: str, row: dict[str, Any], stock: dict[str, Any], units: dict[str, list[float]]) -> tuple[str, ...]:
    losses, gaps = row["losses"], gaps_of(row, stock)
    half, gap = interval(gaps), statistics.mean(gaps)
    loss = f"{statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else "one seed"
    return (
        name,
        f"{row['kept_h']:.2f}",
        f"{row['kept_h'] / stock['kept_h']:.3f}",
        f"{row['gradient_error']:.2%}",
        *(ratios(row.get("gradient_errors", []), units[way]) for way in WAYS),
        f"{row['cosine']:.5f}",
        f"{row['step_ratio']:.2f}",
        loss,
        f"{gap:+.2f}%" + (f" ± {half:.2f}%" if half is not None else ""),
        told_apart(gap, half),
    )


def write_reports(folder: Path) -> None:
    """Print the tables of all jobs measured so far; write evaluation.md and evaluation.png into the folder."""
    jobs = {path.stem.removeprefix("evaluation-"): json.loads(path.read_text()) for path in _measured(folder)}
    lines: list[str] = []
    for job, results in jobs.items():
        notes = {**results["settings"], **results["versions"]}
        commands = " and ".join(f"`{results[key]}`" for key in ("command", "renewed") if key in results)
        lines += [f"## {job}", "", f"{commands} ({', '.join(f'{k} {v}' for k, v in notes.items())})", ""]
        units = results["bf16_errors"]
        said = [f"{statistics.median(units[w]):.2%} ({min(units[w]):.2%} to {max(units[w]):.2%})" for w in WAYS]
        lines += [
            f"In the gradients of the same {len(units[WAYS[0]])} batches bf16 autocast errs by {said[0]}, a model"
        ]
        lines[-1] += f" with weights in bf16 by {said[1]}: medians and ranges, as in the table."
        lines += ["", *_table(job, results["rows"], units)]
    lines += ["x step is the ratio of tiny batches on one CPU thread: no claim about speed.", ""]
    lines += ["## What the papers report", ""]
    for paper in PAPERS.values():
        claims = dict.fromkeys(claim.text for claim in paper.claims if paper.preset)
        lines += [f"- `{paper.preset}`: {paper.title} (arXiv {paper.arxiv}): {claim}" for claim in claims]
    (folder / "evaluation.md").write_text("\n".join(lines) + "\n")
    plot(folder)
    print(f"Written: evaluation.md and evaluation.png in {folder}")


def _measured(folder: Path) -> list[Path]:
    """The files of the jobs, with MiniLM first, because its weights are real."""
    return sorted(folder.glob("evaluation-*.json"), key=lambda path: ("minilm" not in path.stem, path.stem))


def _table(job: str, rows: dict[str, Any], units: dict[str, list[float]]) -> list[str]:
    """The rows in markdown; printed as well."""
    table = Table(*COLUMNS, title=job)
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for name, row in rows.items():
        cells = _row(name, row, rows["stock"], units)
        table.add_row(*cells)
        lines.append(f"| {' | '.join(cells)} |")
    Console().print(table)
    return [*lines, ""]


def plot(folder: Path) -> None:
    """Loss against stock, with its 95% interval, and kept bytes: a line per preset, a pair of panels per model."""
    from matplotlib.figure import Figure

    sources = _measured(folder)
    jobs = {path.stem.removeprefix("evaluation-"): json.loads(path.read_text()) for path in sources}
    most = max(len(job["rows"]) for job in jobs.values())
    figure = Figure(figsize=(max(6, 4.6 * len(jobs)), 2.0 + 0.24 * most), layout="constrained")
    for part, (name, job) in zip(figure.subfigures(1, len(jobs), squeeze=False)[0], jobs.items(), strict=True):
        _pair(part, _MODELS.get(name, name), job)
    head(figure, "Presets against stock, trained on the source text of Python's standard library")
    note = f"Kept: bytes of the layers in bfloat16. Loss: mean and 95% interval over {_seeds(jobs.values())}"
    single = any(len(row["losses"]) == 1 for job in jobs.values() for row in job["rows"].values())
    note += "; lossless presets train with one." if single else "."
    legend(figure, (preset for job in jobs.values() for preset in job["rows"]), note)
    save(figure, folder / "evaluation.png", *sorted(sources))


def _seeds(jobs: Iterable[dict[str, Any]]) -> str:
    """How many orders of the batches the means are over."""
    counts = sorted({job["settings"]["seeds"] for job in jobs})
    return f"{' or '.join(map(str, counts))} seeds"


def _pair(figure: Any, model: str, job: dict[str, Any]) -> None:
    """The two panels of one model."""
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.2])
    rows, stock, settings = job["rows"], job["rows"]["stock"], job["settings"]
    kept = [row["kept_h"] / stock["kept_h"] for row in rows.values()]
    figure.suptitle(f"{model}, {settings['start']}, {settings['steps']} steps", fontsize=9, fontweight="bold")
    bars(left, "kept, stock = 1", list(rows), kept, ".2f")
    for place, (name, row) in enumerate(rows.items()):
        gaps, colour = gaps_of(row, stock), colour_of(name)
        spread = interval(gaps) or 0
        right.errorbar(statistics.mean(gaps), place, xerr=spread, fmt="o", markersize=5, capsize=2, color=colour)
    reference(right, 0)
    right.set_yticks(range(len(rows)), [])
    right.set_ylim(left.get_ylim())
    right.set_title("held-out loss against stock, %", fontsize=9)
    plain(right)
