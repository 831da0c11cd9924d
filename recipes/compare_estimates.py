"""Compares `estimate` with the peaks that recipes/benchmark.py has measured. It needs no GPU.

    python recipes/compare_estimates.py --results results/gpu --out results/gpu/estimates

Reads every benchmark.jsonl below the folder. For each mode whose memory can be estimated (stock, checkpointing and the
presets): the measured peak of a step above weights, gradients and optimizer states, the estimated one, and their ratio.
Writes estimates.json and estimates.md after each row.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common.bench_models import build, shape_of
from common.files import replace_text

from hf_actcompress import PRESETS, estimate

MIB = 2**20
COLUMNS = ("device", "model", "mode", "batch", "sequence", "measured MiB", "estimated MiB", "estimated over measured")


@dataclass(frozen=True)
class Row:
    """One measured peak and its estimate, in MiB."""

    device: str
    model: str
    mode: str
    batch: int
    seq_len: int
    measured_mib: float
    estimated_mib: float


def measurements(folder: Path) -> Iterator[dict[str, Any]]:
    """The records that have a peak and a mode that can be estimated."""
    for path in sorted(folder.rglob("benchmark.jsonl")):
        for record in map(json.loads, path.read_text().splitlines()):
            if record["suite"] == "equal" and record["peak_mib"] and estimated_mode(record["mode"]):
                yield record


def estimated_mode(mode: str) -> tuple[str, bool] | None:
    """(config, whether layers are checkpointed); None for modes that `estimate` does not cover (peers, compilers)."""
    config, _, checkpointing = mode.partition("+")
    if mode == "checkpointing":
        return "stock", True
    known = config in (*PRESETS, "stock") and checkpointing in ("", "checkpointing")
    return (config, bool(checkpointing)) if known else None


def compare(record: dict[str, Any]) -> Row:
    options = argparse.Namespace(**{**record["options"], "device": "meta"})
    config, checkpointing = estimated_mode(record["mode"]) or ("stock", False)
    family, shape = shape_of(record["model"], options)
    stock = build(family, shape, argparse.Namespace(**{**vars(options), "lora": False}))
    found = estimate(
        stock.config,
        batch_size=record["batch"], seq_len=record["seq_len"], config=config, dtype=options.dtype,
        lora=16 if options.lora else None, gradient_checkpointing=checkpointing,
        device=record["options"]["device"], autocast="bfloat16" if options.autocast else None,
    )  # fmt: skip
    sizes = record["batch"], record["seq_len"], record["peak_mib"], found.step_peak_bytes / MIB
    return Row(record["device"], record["model"] + (", LoRA" if options.lora else ""), record["mode"], *sizes)


def markdown(rows: Sequence[Row]) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for r in rows:
        sizes = f"{r.batch} | {r.seq_len} | {r.measured_mib:,.1f} | {r.estimated_mib:,.1f}"
        lines.append(f"| {r.device} | {r.model} | {r.mode} | {sizes} | {r.estimated_mib / r.measured_mib:.3f} |")
    return "\n".join(lines) + "\n"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="folder with benchmark.jsonl files below it")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    rows: list[Row] = []
    for record in measurements(args.results):
        rows.append(compare(record))
        replace_text(args.out / "estimates.json", json.dumps([asdict(row) for row in rows], indent=2) + "\n")
        replace_text(args.out / "estimates.md", markdown(rows))
    if not rows:
        print(f"no benchmark.jsonl with a measured peak below {args.results}", file=sys.stderr)
        return 1
    print(markdown(rows))
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
