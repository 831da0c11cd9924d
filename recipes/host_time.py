"""What a layer costs the host: time, launches and autograd nodes of a whole step, stock and patched.

    python recipes/host_time.py
    python recipes/host_time.py --tokens recipes/results/host/host_time.json --out results/
    python recipes/host_time.py --models llama --modes stock exact "leaf by leaf" --repeats 5 --out results/

Tensors are tiny, so that a CPU's time is that of Python, autograd and the dispatcher: what a GPU waits for when its own
work per layer is less. All figures are per layer, forward and backward: the slope between two depths. Times are process
time on one thread, interleaved, the minimum of many steps; of --repeats such runs the median and the range are given.
"Launches" are dispatched ops that are no views and would run a kernel; matrix products and calls of a fused attention
are among them. Bytes are those that all others move, counted at a width of 512 (common/moved.py): per token, over the
hidden size. Of compiled layers, kernels that the compiler has made and their bytes are not counted. Writes
host_time.json and host_time.md.

With --tokens and such files: computes, by model and GPU, from how many tokens per step on exact costs a GPU no
time. This is not measured (common/free_from.py). Writes free_from.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from common.bench_models import FAMILIES, Shape, with_adapters
from common.bench_report import environment
from common.files import replace_text
from common.free_from import table
from common.host import COUNTED, Build, Counts, counts, host_microseconds

from hf_actcompress import PRESETS, CompressionConfig, patch_model

COLUMNS = ("model", "mode", "host us", "x stock", *COUNTED.values())
Prepare = Callable[[Any], Any]

MODES: dict[str, Prepare] = {
    "stock": lambda model: model,
    **{name: lambda model, name=name: patch_model(model, name) for name in PRESETS},  # type: ignore[misc]
    "exact compiled": lambda model: patch_model(model, compile=True),
    "int8 compiled": lambda model: patch_model(model, "int8", compile=True),
    "leaf by leaf": lambda model: patch_model(model, CompressionConfig(plans=False)),
    "without the net": lambda model: patch_model(model, CompressionConfig(net=False)),
}


@dataclass(frozen=True)
class Row:
    """One mode of one model, per layer."""

    model: str
    mode: str
    microseconds: list[float]
    ratios: list[float]
    counts: Counts


def builder(name: str, mode: str, args: argparse.Namespace) -> Build:
    """Makes models of any size in this mode."""

    def build(shape: Shape) -> Any:
        torch.manual_seed(0)
        model = FAMILIES[name](shape, 512).to(getattr(torch, args.dtype)).train()
        model.config.use_cache = args.use_cache
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = args.dropout if module.p > 0 else 0.0
        return MODES[mode](with_adapters(model, 4) if args.lora else model)

    return build


def measure(name: str, args: argparse.Namespace) -> list[Row]:
    builds = [builder(name, mode, args) for mode in args.modes]
    runs = [host_microseconds(builds, args.hidden, args.rounds) for _ in range(args.repeats)]
    stock = args.modes.index("stock")
    rows = []
    for i, mode in enumerate(args.modes):
        ratios = [run[i] / run[stock] for run in runs]
        rows.append(Row(name, mode, [run[i] for run in runs], ratios, counts(builds[i], name, args.hidden)))
    return rows


def markdown(rows: Sequence[Row], about: dict[str, Any]) -> str:
    lines = [
        f"`{about['command']}`",
        "",
        f"{about['device']}, torch {about['torch']}, transformers {about['transformers']}",
    ]
    lines += ["", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for r in rows:
        ratio = f"{statistics.median(r.ratios):.2f} ({min(r.ratios):.2f} to {max(r.ratios):.2f})"
        cells = [r.model, r.mode, f"{statistics.median(r.microseconds):.0f}", ratio]
        lines.append(f"| {' | '.join([*cells, *(f'{x:.1f}' for x in astuple(r.counts))])} |")
    return "\n".join(lines) + "\n"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["stock", "exact", "leaf by leaf"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lora", action="store_true", help="adapters of rank 4 on all linear layers")
    parser.add_argument("--use-cache", action="store_true", help="as the configs have it by default")
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4, help="of 25 steps, in each of which every mode has its turn")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", nargs="+", type=Path, metavar="JSON", help="measure nothing: a table of these")
    parser.add_argument("--utilisation", type=float, default=0.4, help="with --tokens: share of the GPU's peak")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    args = parser.parse_args(argv)
    if "stock" not in args.modes:
        parser.error("--modes: stock is what the others are compared with")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    torch.set_num_threads(1)
    command = shlex.join(["python", "recipes/host_time.py", *(sys.argv[1:] if argv is None else argv)])
    if args.tokens:
        free = table([json.loads(path.read_text()) for path in args.tokens], args.utilisation)
        title = (
            f"`{command}`\n\nComputed, not measured on a GPU: from how many tokens per step exact costs no time.\n\n"
        )
        replace_text(args.out / "free_from.md", title + free)
        print(free)
        return 0
    about = environment("cpu", command, vars(args))
    rows: list[Row] = []
    for name in args.models:
        rows += measure(name, args)
        record = {**about, "rows": [asdict(row) for row in rows]}
        replace_text(args.out / "host_time.json", json.dumps(record, indent=2) + "\n")
        replace_text(args.out / "host_time.md", markdown(rows, about))
    print(markdown(rows, about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
