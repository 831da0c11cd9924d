"""How the benchmark's results are written: JSON lines, a table in markdown, a picture per suite."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from .bench_suites import Result
from .drawing import bars, head, legend, save
from .files import replace_text
from .host import COUNTED
from .versions import PACKAGES, device_name, versions

# column -> how a result fills it
_EQUAL = {
    "kept, h per token, layer": lambda r: _number(r.kept_h, ".2f"),
    "peak MiB": lambda r: _number(r.peak_mib, ".1f"),
    "with new gradients": lambda r: _number(r.new_gradients_mib, ".1f"),
    "step ms": lambda r: _number(r.step_ms, ".1f"),
    "x stock": lambda r: _number(r.step_ratio, ".3f"),
    "tokens/s": lambda r: _number(r.tokens_per_second, ",.0f"),
    "graphs, breaks, new for 3 lengths": lambda r: (
        "-" if r.graphs is None else f"{r.graphs}, {r.breaks}, {r.new_graphs}"
    ),
    "difference from stock": lambda r: _number(r.gradient_error, ".1e") + ("" if r.correct else ", wrong"),
    "error against fp64": lambda r: _number(r.fp64_error, ".1e"),
}
_LARGEST = {
    "card": lambda r: r.cap,
    "sequence": lambda r: str(r.seq_len),
    "largest batch": lambda r: str(r.batch) if r.batch else "-",
    "total MiB": lambda r: _number(r.total_mib, ",.0f"),
    "step ms": lambda r: _number(r.step_ms, ".1f"),
    "tokens/s": lambda r: _number(r.tokens_per_second, ",.0f"),
}
_BYTES = {
    "kept, h per token, layer": _EQUAL["kept, h per token, layer"],
    "peak MiB": _EQUAL["peak MiB"],
    "error against fp64": lambda r: _number(r.fp64_error, ".2e"),
    "graphs, breaks": lambda r: "-" if r.graphs is None else f"{r.graphs}, {r.breaks}",
    "first step, CPU s": lambda r: _number(r.first_step_s, ".1f"),
    "x compiled stock": lambda r: _number(r.first_step_ratio, ".2f"),
}
_HOST = {
    "host us": lambda r: _number(r.host_us, ".0f"),
    "x stock": lambda r: _number(r.host_ratio, ".2f"),
    **{
        column: lambda r, name=name: "-" if r.host is None else f"{getattr(r.host, name):.1f}"
        for name, column in COUNTED.items()
    },
}
COLUMNS = {"equal": _EQUAL, "largest": _LARGEST, "bytes": _BYTES, "host": _HOST}


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def environment(device: str, command: str, options: dict[str, Any]) -> dict[str, Any]:
    """The machine, the versions and the command that figures were measured with."""
    return {
        "command": command,
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **versions(PACKAGES),
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in options.items()},
    }


def _times(suites: set[str], options: dict[str, Any]) -> str:
    """How a step was timed; suite "bytes" times none."""
    if suites == {"bytes"}:
        return ""
    if suites == {"host"}:
        return f"; the host's time is that of tiny models on one thread, the least of {options['rounds']} x 25 steps"
    what = "medians" if options["device"] == "cuda" else "the least CPU time of all threads"
    return f"; {what} of {options['rounds']} rounds, interleaved, after one warm-up step each"


def _lora(options: dict[str, Any]) -> str:
    return f", LoRA with dropout {options['lora_dropout']}" if options["lora"] else ""


def markdown(results: Sequence[Result], about: dict[str, Any]) -> str:
    """The command, the machine, and a table per suite."""
    options, suites = about["options"], {result.suite for result in results}
    lines = [
        f"`{about['command']}`",
        "",
        f"{about['device']}, {about['threads']} threads, torch {about['torch']}, transformers {about['transformers']}, "
        f"triton {about['triton']}, liger-kernel {about['liger-kernel']}",
        f"{options['grain']}{_lora(options)}, h = {options['hidden']}, {options['layers']} layers "
        f"and a vocabulary of {options['vocab']} where the name is no shape, dropout {options['dropout']}, batch "
        f"{options['batch']}, sequence {options['seq_len']}{_times(suites, options)}.",
        "",
    ]
    for suite, columns in COLUMNS.items():
        rows = [result for result in results if result.suite == suite]
        notes = any(result.note for result in rows)
        names = ["model", "mode", *columns, *(["note"] if notes else [])]
        if rows:
            lines += [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
        for result in rows:
            cells = [result.model, result.mode, *(fill(result) for fill in columns.values())]
            lines.append(f"| {' | '.join([*cells, *([result.note] if notes else [])])} |")
        lines += [""] if rows else []
    return "\n".join(lines)


def write(results: Sequence[Result], about: dict[str, Any], folder: Path) -> None:
    """benchmark.jsonl (one record per result) and benchmark.md; each replaced as a whole, so that none is cut off."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [json.dumps({**asdict(result), **about}) for result in results]
    replace_text(folder / "benchmark.jsonl", "\n".join(records) + "\n")
    replace_text(folder / "benchmark.md", markdown(results, about))


def read(path: Path) -> list[Result]:
    """The results of a benchmark.jsonl."""
    names = {field.name for field in fields(Result)}
    records = map(json.loads, path.read_text().splitlines())
    return [Result(**{key: value for key, value in record.items() if key in names}) for record in records]


def plot(results: Sequence[Result], path: Path, about: dict[str, Any]) -> None:
    """Draws a row per model: kept bytes and step time at one batch size, and the largest batch of each card."""
    from matplotlib.figure import Figure

    rows = {model: _panels(results, model) for model in dict.fromkeys(r.model for r in results)}
    # a suite may have nothing to draw
    wide = max(1, *map(len, rows.values()), 1)
    tall = [0.7 + 0.26 * max((len(names) for _, names, _, _ in panels), default=1) for panels in rows.values()] or [1.0]
    figure = Figure(figsize=(max(6, 4.5 * wide), 0.9 + sum(tall)), layout="constrained")
    places = figure.subplots(len(tall), wide, squeeze=False, height_ratios=tall)
    for line, (model, panels) in zip(places, rows.items(), strict=False):
        for axes, (title, names, values, form) in zip(line, panels, strict=False):
            bars(axes, f"{model}: {title}", names, values, form)
        for axes in line[len(panels) :]:
            axes.set_axis_off()
    options = about["options"]
    batch = f"batch {options['batch']} x {options['seq_len']}"
    head(figure, f"{options['grain']}, {batch}, {about['device']}, torch {about['torch']}")
    legend(figure, (result.mode for result in results))
    save(figure, path, path.with_suffix(".jsonl"))


def _panels(results: Sequence[Result], model: str) -> list[tuple[str, list[str], list[float], str]]:
    ours = [result for result in results if result.model == model]
    kept = [r for r in ours if r.kept_h is not None]
    fast = [r for r in ours if r.suite == "equal" and r.step_ratio is not None]
    large = [r for r in ours if r.suite == "largest" and r.batch]
    panels = [
        ("kept, h per token and layer", [r.mode for r in kept], [r.kept_h or 0 for r in kept], ".1f"),
        ("time of a step, stock = 1", [r.mode for r in fast], [r.step_ratio or 0 for r in fast], ".2f"),
        ("largest batch", [f"{r.mode}, {r.cap}" for r in large], [float(r.batch) for r in large], ".0f"),
    ]
    return [panel for panel in panels if panel[1]]
