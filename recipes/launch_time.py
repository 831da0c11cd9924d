"""What a launch of a Triton kernel costs the host in Python, without a GPU.

    python recipes/launch_time.py
    python recipes/launch_time.py --out recipes/results/host

Triton's compiled code and its driver are replaced by functions that do nothing; tensors are small and on the CPU. So
the time is that of Python, and of the allocations of results. "Function" is a call of a kernel's function as it is
written, "record" the same call when it has come before (hf_actcompress/kernels/recorded.py). Process time, the two
interleaved, the minimum of --rounds rounds; the median and the range of --repeats such runs. Writes launches.json and
launches.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton
from common.bench_report import environment
from common.files import replace_text
from torch import Tensor

from hf_actcompress.kernels import KERNELS, launch
from hf_actcompress.kernels.recorded import recorded

# what layers launch in training; the first sample of each is taken
NAMES = (
    "rope_fwd", "rope_bwd", "rms_norm_fwd", "rms_norm_rebuild", "rms_norm_bwd", "layer_norm_bwd", "activation_bwd",
    "gated_product", "gated_product_and_bwd", "int_group_pack", "int_group_unpack",
)  # fmt: skip


class _Compiled:
    """Code that does nothing."""

    function, packed_metadata = 0, (1,)

    def run(self, *args: Any) -> None:
        pass


class _Search:
    """In the place of Triton's search for code."""

    def __init__(self, jit: Any) -> None:
        self.arg_names = jit.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., _Compiled]:
        return lambda *args, **options: _Compiled()


def replace_triton() -> None:
    """Let all launches do nothing."""
    launch.CompiledKernel, launch.stream_of = _Compiled, lambda device: 0  # type: ignore[assignment, misc]
    for path in dict.fromkeys(KERNELS.values()):
        for found in vars(importlib.import_module(f"hf_actcompress.{path}")).values():
            if isinstance(found, launch.CachedLaunches) and not isinstance(found.jit, _Search):
                found.jit = _Search(found.jit)


def times(name: str, rounds: int, calls: int = 200) -> dict[str, float]:
    """Microseconds of a call in both forms, and how many launches it makes."""
    module = importlib.import_module(f"hf_actcompress.{KERNELS[name]}")
    args = next(iter(module.SAMPLES[name](torch.device("cpu"), torch.bfloat16, 64, 64)))
    function = getattr(module, name)
    forms = {"function": function, "record": recorded(function)}
    for _ in range(3):
        forms["record"](*args)
    best = dict.fromkeys(forms, float("inf"))
    for _ in range(rounds):
        for form, call in forms.items():
            began = time.process_time()
            for _ in range(calls):
                call(*args)
            best[form] = min(best[form], (time.process_time() - began) / calls * 1e6)
    seen: list[Any] = []
    with launch.noted(seen):
        found = function(*args)
    made = sum(isinstance(x, Tensor) for x in (found if isinstance(found, tuple) else [found]))
    return {**best, "launches": len(seen), "results": made}


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["| kernel | launches | results | function, us | record, us |", "|---|---|---|---|---|"]
    for row in rows:
        spans = [f"{median(us):.1f} ({min(us):.1f} to {max(us):.1f})" for us in (row["function"], row["record"])]
        lines.append(f"| {row['kernel']} | {row['launches']} | {row['results']} | {' | '.join(spans)} |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    command = shlex.join(["python", "recipes/launch_time.py", *(sys.argv[1:] if argv is None else argv)])
    about = environment("cpu", command, vars(args))
    torch.set_num_threads(1)
    replace_triton()
    rows = []
    with torch.no_grad():
        for name in args.kernels:
            runs = [times(name, args.rounds) for _ in range(args.repeats)]
            row = {key: [run[key] for run in runs] for key in ("function", "record")}
            rows.append({"kernel": name, **row, "launches": runs[0]["launches"], "results": runs[0]["results"]})
    lines = [
        f"`{command}`",
        "",
        f"{about['device']}, torch {about['torch']}, triton {triton.__version__}",
        "",
        *table(rows),
        "",
    ]
    print("\n".join(lines))
    if args.out is not None:
        replace_text(args.out / "launches.json", json.dumps({**about, "rows": rows}, indent=2) + "\n")
        replace_text(args.out / "launches.md", "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
