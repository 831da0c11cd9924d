"""The bytes that a layer's elementwise work moves in a training step: stock, and patched with Triton's kernels.

    python recipes/bytes_moved.py --out recipes/results/bytes
    python recipes/bytes_moved.py --models llama --by-op
    python recipes/bytes_moved.py --models llama --lora --out recipes/results/bytes/lora

What matrix products and attention move is left out: it is the same on both sides. All else is bound by memory, so its
time on a GPU is close to these bytes over the memory's speed. Counted on a CPU, with kernels in Triton's interpreter
(common/traffic.py says how), per layer and token in units of the hidden size (common/moved.py). Dropout is off: a CPU
draws its masks in several ops where a GPU has one kernel. Writes bytes_moved.json and bytes_moved.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# set before triton is imported
os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from common.bench_models import FAMILIES, Shape, with_adapters
from common.bench_report import environment
from common.files import replace_text
from common.moved import SEQUENCE, per_token
from common.traffic import interpreted_launches

from hf_actcompress import patch_model
from hf_actcompress.dispatch import use

COLUMNS = ("model", "mode", "forward", "backward", "total", "x stock", "launches")

# mode -> (what changes a stock model into that mode, which implementations run)
MODES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "stock": (lambda model: model, "reference"),
    "exact": (patch_model, "reference"),
    "exact, kernels": (patch_model, "triton"),
}


@dataclass(frozen=True)
class Row:
    """One mode of one model; bytes per layer and token over the hidden size, launches per layer."""

    model: str
    mode: str
    forward: dict[str, float]
    backward: dict[str, float]
    launches: float

    @property
    def total(self) -> float:
        return sum(self.forward.values()) + sum(self.backward.values())


def build(name: str, shape: Shape, lora: bool) -> Any:
    torch.manual_seed(0)
    model = FAMILIES[name](shape, SEQUENCE)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model = model.to(torch.bfloat16).train()
    return with_adapters(model, 16) if lora else model


def measure(name: str, mode: str, hidden: int, lora: bool = False) -> Row:
    prepare, choice = MODES[mode]
    with use(choice):
        found = per_token(lambda s: prepare(build(name, s, lora)), name, hidden, watch=interpreted_launches)
        return Row(name, mode, *found)


def markdown(rows: Sequence[Row], about: dict[str, Any]) -> str:
    stock = {row.model: row.total for row in rows if row.mode == "stock"}
    lines = [
        f"`{about['command']}`",
        "",
        f"torch {about['torch']}, transformers {about['transformers']}, triton {about['triton']}; bf16, dropout 0, "
        f"{'adapters of rank 16 in fp32 on all linear layers, ' if about['options']['lora'] else ''}"
        f"hidden {about['options']['hidden']}. Bytes that are neither of products nor of attention, per layer and "
        "token, over the hidden size.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for row in rows:
        ways = (sum(row.forward.values()), sum(row.backward.values()), row.total)
        cells = [row.model, row.mode, *(f"{moved:.0f}" for moved in ways)]
        ratio = f"{row.total / stock[row.model]:.2f}" if row.model in stock else "-"
        lines.append(f"| {' | '.join([*cells, ratio, f'{row.launches:.0f}'])} |")
    return "\n".join(lines) + "\n"


def by_op(rows: Sequence[Row]) -> str:
    """For each row, the ops that move the most bytes."""
    return "\n".join(
        f"{row.model}, {row.mode}, {way}: " + ", ".join(f"{op} {moved:.1f}" for op, moved in list(found.items())[:14])
        for row in rows
        for way, found in (("forward", row.forward), ("backward", row.backward))
    )


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument(
        "--lora", action="store_true", help="adapters of rank 16 on all linear layers, as PEFT makes them"
    )
    parser.add_argument("--by-op", action="store_true", help="print which ops and kernels move the bytes")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    args = parser.parse_args(argv)
    if args.hidden % 32:
        parser.error("--hidden: a multiple of 32: four heads of an even size")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    torch.set_num_threads(1)
    command = shlex.join(["python", "recipes/bytes_moved.py", *(sys.argv[1:] if argv is None else argv)])
    about = environment("cpu", command, vars(args))
    rows: list[Row] = []
    for name in args.models:
        rows += [measure(name, mode, args.hidden, args.lora) for mode in args.modes]
        record = {**about, "rows": [{**asdict(row), "total": row.total} for row in rows]}
        replace_text(args.out / "bytes_moved.json", json.dumps(record, indent=2) + "\n")
        replace_text(args.out / "bytes_moved.md", markdown(rows, about))
    print(markdown(rows, about))
    if args.by_op:
        print(by_op(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
