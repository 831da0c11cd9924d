"""What a layer costs the host: time, launches and autograd nodes of a whole step, stock beside patched.

    python recipes/host_time.py
    python recipes/host_time.py --models llama --modes stock exact "leaf by leaf" --repeats 5 --out results/

Tensors are tiny, so that a CPU's time is that of Python, autograd and the dispatcher: what a GPU waits for when its own
work per layer is less. All figures are per layer, forward and backward: the slope between two depths. Times are process
time on one thread, interleaved, the minimum of many steps; of --repeats such runs the median and the range are given.
"Launches" are dispatched ops that are no views and would run a kernel; "products" are the matrix products among them.
Writes host_time.json and host_time.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common.bench_models import FAMILIES, Shape, with_adapters
from common.bench_report import environment
from common.files import replace_text
from common.traffic import Traffic

from hf_actcompress import PRESETS, CompressionConfig, patch_model

DEPTHS = (4, 12)
STEPS = 25
COLUMNS = ("model", "mode", "host us", "x stock", "launches", "products", "autograd nodes")
Prepare = Callable[[Any], Any]

MODES: dict[str, Prepare] = {
    "stock": lambda model: model,
    **{name: lambda model, name=name: patch_model(model, name) for name in PRESETS},  # type: ignore[misc]
    "leaf by leaf": lambda model: patch_model(model, CompressionConfig(programs=False)),
    "without the net": lambda model: patch_model(model, CompressionConfig(net=False)),
}


@dataclass(frozen=True)
class Row:
    """One mode of one model, per layer."""

    model: str
    mode: str
    microseconds: list[float]
    ratios: list[float]
    launches: float
    products: float
    nodes: float


def build(name: str, mode: str, layers: int, args: argparse.Namespace) -> Any:
    shape = Shape(args.hidden, layers, 2, 1, 2 * args.hidden, 200)
    torch.manual_seed(0)
    model = FAMILIES[name](shape, 512).to(getattr(torch, args.dtype)).train()
    model.config.use_cache = args.use_cache
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = args.dropout if module.p > 0 else 0.0
    return MODES[mode](with_adapters(model, 4) if args.lora else model)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 190, (1, 4), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def seconds(model: Any, inputs: dict[str, torch.Tensor]) -> float:
    """Process time of one step."""
    model.zero_grad()
    began = time.process_time()
    model(**inputs).loss.backward()
    return time.process_time() - began


def per_layer(values: Sequence[float]) -> float:
    return (values[1] - values[0]) / (DEPTHS[1] - DEPTHS[0])


def host_microseconds(name: str, args: argparse.Namespace) -> list[float]:
    """The time per layer in each mode, in one run."""
    inputs, at = batch(), []
    for layers in DEPTHS:
        models = [build(name, mode, layers, args) for mode in args.modes]
        best = [float("inf")] * len(models)
        for _ in range(args.rounds * STEPS):
            for i, model in enumerate(models):
                best[i] = min(best[i], seconds(model, inputs))
        at.append(best)
    return [1e6 * per_layer(pair) for pair in zip(*at, strict=True)]


def counts(name: str, mode: str, args: argparse.Namespace) -> tuple[float, float, float]:
    """Launches, products and autograd nodes."""
    found = []
    for layers in DEPTHS:
        model, inputs = build(name, mode, layers, args), batch()
        model(**inputs).loss.backward()
        with Traffic() as counter:
            loss = model(**inputs).loss
            loss.backward()
        found.append((counter.launches, counter.products, nodes(model(**inputs).loss)))
    launches, products, count = (per_layer(pair) for pair in zip(*found, strict=True))
    return launches, products, count


def nodes(loss: torch.Tensor) -> int:
    """Number of nodes in the graph below a loss, without those that add to a parameter's gradient."""
    pending: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen and type(node).__name__ != "AccumulateGrad":
            seen.add(node)
            pending += [parent for parent, _ in node.next_functions]
    return len(seen)


def measure(name: str, args: argparse.Namespace) -> list[Row]:
    runs = [host_microseconds(name, args) for _ in range(args.repeats)]
    stock = args.modes.index("stock")
    rows = []
    for i, mode in enumerate(args.modes):
        ratios = [run[i] / run[stock] for run in runs]
        rows.append(Row(name, mode, [run[i] for run in runs], ratios, *counts(name, mode, args)))
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
        lines.append(f"| {' | '.join([*cells, *(f'{x:.1f}' for x in (r.launches, r.products, r.nodes))])} |")
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
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    args = parser.parse_args(argv)
    if "stock" not in args.modes:
        parser.error("--modes: stock is what the others are compared with")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    torch.set_num_threads(1)
    command = shlex.join(["python", "recipes/host_time.py", *(sys.argv[1:] if argv is None else argv)])
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
