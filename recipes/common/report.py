"""A comparison as a table, a sentence, a JSON file and a picture."""

import argparse
import json
import platform
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import PartialState
from rich.console import Console
from rich.table import Table

from hf_actcompress import PRESETS

from .compare import Comparison, RunResult
from .drawing import bars, colour_of, head, plain, save
from .versions import device_name, versions

MIB = 2**20
PACKAGES = ("hf-actcompress", "torch", "transformers", "accelerate", "peft", "datasets", "tokenizers")


def environment() -> dict[str, str]:
    """What the figures depend on: versions and hardware."""
    found = {"python": platform.python_version(), "platform": platform.platform(), **versions(PACKAGES)}
    on_gpu = torch.cuda.is_available()
    found["device"] = torch.cuda.get_device_name() if on_gpu else device_name("cpu")
    found["threads"] = str(torch.get_num_threads())
    return found


def comparison_table(comparison: Comparison) -> Table:
    """Loss and memory side by side. The runs follow one another, so their speeds cannot be compared."""
    stock, patched = comparison.stock, comparison.patched
    table = Table(title="stock beside patched")
    for name in ("", "stock", "patched", "patched / stock"):
        table.add_column(name, justify="left" if not name else "right")
    rows = [("first loss", stock.losses[0], patched.losses[0]), ("last loss", stock.losses[-1], patched.losses[-1])]
    rows += [(name, value, patched.metrics[name]) for name, value in stock.metrics.items()]
    for name, before, after in rows:
        table.add_row(name, f"{before:.6f}", f"{after:.6f}", "")
    if stock.peak_bytes and patched.peak_bytes is not None:
        ratio = patched.peak_bytes / stock.peak_bytes
        sizes = [f"{result.peak_bytes / MIB:.1f} MiB" for result in (stock, patched)]
        table.add_row("peak activation memory", *sizes, f"{ratio:.2f}")
    return table


def verdict(comparison: Comparison) -> list[str]:
    """Whether the loss curves agree and where the memory went, in plain words."""
    gap, largest, steps = comparison.first_difference, comparison.largest_difference, len(comparison.stock.losses)
    first = "the first is bit-equal" if gap == 0 else f"the first differs by {gap:.2e}"
    first += "" if gap <= comparison.first_tolerance else f" (rounding would allow {comparison.first_tolerance:.2e})"
    whole = f"the largest difference in {steps} steps is {largest:.2e}"
    allowed = f"rounding allows {comparison.tolerance:.2e} ({comparison.tolerance_source})"
    if comparison.agrees and largest == 0:
        sentences = ["The losses agree: every one is bit-equal."]
    else:
        opening = "The losses agree" if comparison.agrees else "The losses DIFFER"
        sentences = [f"{opening}: {first}, {whole}, {allowed}."]
    before, after = comparison.stock.peak_bytes, comparison.patched.peak_bytes
    if before and after is not None:
        saved = f"{100 * (1 - after / before):.0f}% less ({before / after:.2f}x)"
        sentences.append(f"Peak activation memory: {before / MIB:.1f} -> {after / MIB:.1f} MiB, {saved}.")
    return sentences


def plot(path: Path, source: Path) -> None:
    """The two loss curves of compare.json and their distance below them; beside them the memory of both."""
    from matplotlib.figure import Figure

    record = json.loads(source.read_text())
    stock, patched = (record["comparison"][name] for name in ("stock", "patched"))
    asked, preset = record["arguments"], record["arguments"]["preset"]
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=[5, 3], height_ratios=[3, 1])
    top = figure.add_subplot(grid[0, 0])
    bottom, right = figure.add_subplot(grid[1, 0], sharex=top), figure.add_subplot(grid[:, 1])
    steps = range(1, len(stock["losses"]) + 1)
    top.plot(steps, stock["losses"], label="stock", linewidth=4, color=colour_of("stock"), alpha=0.6)
    top.plot(steps, patched["losses"], label=preset, linewidth=1.2, color=colour_of(preset))
    top.set_ylabel("training loss", fontsize=9)
    top.legend(fontsize=8, frameon=False)
    top.tick_params(labelbottom=False)
    gaps = [b - a for a, b in zip(stock["losses"], patched["losses"], strict=True)]
    bottom.plot(steps, gaps, color=colour_of(preset), linewidth=1)
    bottom.set_xlabel("step", fontsize=9)
    bottom.set_ylabel(f"{preset} - stock", fontsize=9)
    bottom.yaxis.get_offset_text().set_fontsize(8)
    for axes in (top, bottom):
        plain(axes)
    sizes = [run["peak_bytes"] / MIB for run in (stock, patched)]
    bars(right, f"peak activation memory, MiB: {1 - sizes[1] / sizes[0]:.0%} less", ["stock", preset], sizes, ".1f")
    model = asked["model"] or asked["config"]
    words = model, f"{asked['batch_size']} x {asked['seq_len']} tokens", asked["dtype"], record["environment"]["device"]
    head(figure, ", ".join(words))
    save(figure, path, source)


def write_json(comparison: Comparison, args: argparse.Namespace, path: Path) -> None:
    """Write all that is needed to read the figures again, or to measure them again."""
    document = {
        "command": shlex.join(["python", *sys.argv]),
        "arguments": {name: value if _plain(value) else str(value) for name, value in vars(args).items()},
        "environment": environment(),
        "comparison": asdict(comparison),
        "verdict": verdict(comparison),
    }
    path.write_text(json.dumps(document, indent=2) + "\n")


def _plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


def publish(comparison: Comparison, args: argparse.Namespace) -> int:
    """Print the table and the verdict, write JSON and PNG.

    Returns the exit status: 1 where a lossless preset does not agree with stock.
    """
    status = int(PRESETS[args.preset].lossless and not comparison.agrees)
    if not PartialState().is_main_process:
        return status
    console = Console()
    console.print(comparison_table(comparison))
    for line in verdict(comparison):
        console.print(line, highlight=False)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    write_json(comparison, args, args.output_dir / "compare.json")
    plot(args.output_dir / "compare.png", args.output_dir / "compare.json")
    console.print(f"Written: {args.output_dir / 'compare.json'} and compare.png", highlight=False, soft_wrap=True)
    return status


def print_run(result: RunResult) -> None:
    """Print one line for a run that is compared with nothing."""
    if not PartialState().is_main_process:
        return
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
    Console().print(f"last loss {result.losses[-1]:.4f}, {metrics}, {result.tokens_per_second:,.0f} tokens/s")
