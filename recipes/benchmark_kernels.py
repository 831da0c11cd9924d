"""Checks every Triton kernel, then measures its speed against the memory's, torch's reference and Liger's kernel.

    python recipes/benchmark_kernels.py --device cuda --out results/
    python recipes/benchmark_kernels.py --device cuda --timed            # only those that `auto` times itself
    python recipes/benchmark_kernels.py --roofline                       # where these must win, without a GPU
    python recipes/benchmark_kernels.py --quick                          # a CPU: Triton's interpreter, no speeds

Sizes are those of Llama-3.2-1B in training: 16384 tokens, hidden 2048, MLP 8192. "of copy" is the achieved bandwidth
(bytes of arguments and results divided by the median time) relative to that of a plain copy in the same run. A kernel
that disagrees with the reference gets no figure, and the command fails. Weight gradients from codes are not compared
with the reference, but with what `auto` would run: the kernel that unpacks, and torch's product. Below the table: where
a kernel that `auto` uses is slower, and where one that it times is faster. Writes kernels.jsonl and kernels.md after
every line.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import roofline
from common.bench_kernel_cases import CASES, LINEARS, Args, Case, Functions, Shape
from common.bench_kernel_peers import liger
from common.versions import versions
from tqdm import tqdm

from hf_actcompress.kernels import KERNELS, TIMED
from hf_actcompress.reference.table import FUNCTIONS

TOKENS, HIDDEN, MLP = 16384, 2048, 8192
PACKAGES = ("torch", "triton", "liger-kernel", "hf-actcompress")
MIB = 2**20
COLUMNS = (
    "kernel", "case", "correct", "MiB moved", "ms", "GiB/s", "of copy", "reference ms", "x reference", "Liger ms",
    "x Liger",
)  # fmt: skip


@dataclass
class Result:
    """A measured case. Times are in ms; None where nothing was measured."""

    kernel: str
    label: str
    correct: bool
    moved_mib: float
    ms: float | None = None
    gib_per_second: float | None = None
    of_copy: float | None = None
    reference_ms: float | None = None
    liger_ms: float | None = None
    note: str = ""


def arguments(case: Case, device: torch.device, args: argparse.Namespace) -> Args:
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)
    if case.make is not None:
        return case.make(Shape(device, dtype, args.tokens, args.hidden, args.mlp), specification)
    samples = module(case.name).SAMPLES[case.name](device, dtype, args.tokens, args.mlp if case.mlp else args.hidden)
    return next(sample for sample in samples if case.sample is None or case.sample(sample))


def module(name: str) -> Any:
    return importlib.import_module(f"hf_actcompress.{KERNELS[name]}")


def kernels(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(module(name), name)
    return function


def specification(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = FUNCTIONS[name]
    return function


def tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from tensors(value)


def moved_bytes(*values: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors(values))


def milliseconds(run: Callable[[], Any]) -> float:
    """Median of many runs, each from a cold cache."""
    from triton.testing import do_bench

    return float(do_bench(run, warmup=25, rep=100, return_mode="median"))


def copy_bandwidth(device: torch.device) -> float:
    """GiB/s of a plain copy, read and written bytes counted."""
    x = torch.empty(512 * MIB, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * x.numel() / 2**30 / (milliseconds(lambda: y.copy_(x)) / 1e3)


def measure(case: Case, device: torch.device, args: argparse.Namespace, copy: float | None) -> Result:
    """Check correctness, and on a GPU (`copy` is its bandwidth) measure the times if the kernel is correct."""
    # triton reads its environment when it is imported
    from triton.errors import TritonError

    from hf_actcompress.kernels.probe import agree

    given = arguments(case, device, args)

    def call(functions: Functions) -> Any:
        return case.run(functions, given) if case.run else functions(case.name)(*given)

    def rival() -> Any:
        return case.rival(kernels, given) if case.rival else call(specification)

    ours, correct = list(tensors(call(kernels))), True
    for other in (call(specification), rival() if case.rival else None):
        expected = list(tensors(other))
        correct &= other is None or len(ours) == len(expected)
        correct &= all(agree(a, b, False) for a, b in zip(ours, expected, strict=False))
    result = Result(case.name, case.label, correct, moved_bytes(given, ours) / MIB)
    del ours, expected, other
    if not correct or copy is None:
        return result
    result.ms, result.reference_ms = milliseconds(lambda: call(kernels)), milliseconds(rival)
    if case.bandwidth:
        result.gib_per_second = result.moved_mib / 1024 / (result.ms / 1e3)
        result.of_copy = result.gib_per_second / copy
    try:
        peer = liger(case, given)
        result.liger_ms = milliseconds(peer) if peer else None
    except (TritonError, ImportError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        # a version of Liger or a GPU that do not fit together must not stop our own measurements
        result.note = f"Liger: {type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return result


def environment(device: torch.device, args: argparse.Namespace, copy: float | None, command: str) -> dict[str, Any]:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()}, interpreter"
    sizes = {"tokens": args.tokens, "hidden": args.hidden, "mlp": args.mlp, "dtype": args.dtype}
    return {"command": command, "device": where, "copy_gib_per_second": copy, **versions(PACKAGES), **sizes}


def markdown(results: Sequence[Result], about: dict[str, Any]) -> str:
    copy = about["copy_gib_per_second"]
    speeds = f"copy {copy:.0f} GiB/s; medians from a cold cache" if copy else "no speeds: the interpreter has none"
    lines = [
        f"`{about['command']}`",
        "",
        f"{about['device']}, torch {about['torch']}, triton {about['triton']}, liger-kernel {about['liger-kernel']}; "
        f"{about['tokens']} tokens, hidden {about['hidden']}, MLP {about['mlp']}, {about['dtype']}; {speeds}.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for r in results:
        ratios = [format(t / r.ms, ".2f") if t and r.ms else "-" for t in (r.reference_ms, r.liger_ms)]
        cells = [r.kernel, r.label, "yes" if r.correct else "NO", f"{r.moved_mib:.3g}"]
        cells += [_cell(r.ms, ".3f"), _cell(r.gib_per_second, ".0f"), _cell(r.of_copy, ".2f")]
        cells += [_cell(r.reference_ms, ".3f"), ratios[0], _cell(r.liger_ms, ".3f"), ratios[1]]
        lines.append(f"| {' | '.join(cells)} |")
    notes = [f"{r.kernel}, {r.label}: {r.note}" for r in results if r.note]
    return "\n".join([*lines, "", *_misplaced(results), *notes, ""])


def _misplaced(results: Sequence[Result]) -> Iterator[str]:
    """Lines about kernels for which, by the measurement, `auto` should choose another implementation."""
    measured = [r for r in results if r.ms and r.reference_ms]
    faster = [r for r in measured if r.kernel in TIMED and r.ms < r.reference_ms]
    slower = [r for r in measured if r.kernel not in TIMED and r.ms > r.reference_ms]
    for said, found in (("Timed by `auto`, and faster", faster), ("Run by `auto`, and slower", slower)):
        if measured:
            names = "; ".join(f"{r.kernel} ({r.label})" if r.label else r.kernel for r in found)
            yield f"{said} than the reference: {names or 'none'}."


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--names", nargs="+", choices=sorted(KERNELS), default=sorted(KERNELS))
    parser.add_argument("--timed", action="store_true", help="those of --names that `auto` runs where they are faster")
    parser.add_argument("--automatic", action="store_true", help="those that it always runs")
    parser.add_argument("--roofline", action="store_true", help="print and write where timed ones must win, and end")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--mlp", type=int, default=MLP)
    parser.add_argument("--quick", action="store_true", help="8 tokens, hidden 128, MLP 256")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine or this torch has no CUDA device")
    if args.quick:
        args.tokens, args.hidden, args.mlp = 8, 128, 256
    for wanted, timed in ((args.timed, True), (args.automatic, False)):
        if wanted:
            args.names = [name for name in args.names if (name in TIMED) is timed]
    if not args.names:
        parser.error("none of these kernels is left to measure")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.roofline:
        print(write_roofline(args))
        return 0
    if args.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    device = torch.device(args.device)
    cases = [case for case in CASES if case.name in args.names]
    command = shlex.join(["python", "recipes/benchmark_kernels.py", *(argv or sys.argv[1:])])
    results: list[Result] = []
    with torch.no_grad():
        copy = copy_bandwidth(device) if device.type == "cuda" else None
        about = environment(device, args, copy, command)
        for case in tqdm(cases, unit="case", disable=None):
            results.append(measure(case, device, args, copy))
            # so that a run which is interrupted leaves what it has measured
            text = write(results, about, args.out)
    print(text)
    return 0 if all(result.correct for result in results) else 1


def write_roofline(args: argparse.Namespace) -> str:
    """Write roofline.md for the linears of a layer of the model, and return it."""
    sizes = Shape(torch.device("cpu"), torch.bfloat16, args.tokens, args.hidden, args.mlp)
    shapes = {name: roofline.Shape(args.tokens, *reversed(linear(sizes))) for name, linear in LINEARS.items()}
    text = roofline.markdown(shapes)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "roofline.md").write_text(text)
    return text


def write(results: Sequence[Result], about: dict[str, Any], folder: Path) -> str:
    """Write kernels.jsonl (one record per result) and kernels.md. Returns the markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    records = (json.dumps({**asdict(result), **about}) for result in results)
    (folder / "kernels.jsonl").write_text("\n".join(records) + "\n")
    text = markdown(results, about)
    (folder / "kernels.md").write_text(text)
    return text


if __name__ == "__main__":
    sys.exit(main())
