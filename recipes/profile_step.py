"""One training step under torch's profiler: which kernels run for how long, and how long the device waits for the host.

    python recipes/profile_step.py --device cuda --models bert-base --batch 16 --seq-len 128 --modes stock exact
    python recipes/profile_step.py --quick

For each mode, after a warm-up: the time of a step without the profiler (median of rounds), the time in which the device
is busy, the kernels launched, and the host's share, which is the part of a step in which no kernel runs. Also two
tables of a profiled step, by the device's time and by the host's own, and a trace for a viewer. Writes profile.json
after each mode, MODE.txt and MODE.trace.json.gz. On a CPU there is no device to wait for, so the figures of the device
are left out.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from common.bench_models import build, shape_of
from common.bench_modes import MODES
from common.bench_options import add_model_options, check_model_options
from common.bench_report import environment
from common.bench_suites import make_batch, make_step, timed
from common.files import replace_text
from torch.autograd.profiler import DeviceType
from torch.profiler import ProfilerActivity, profile

ROWS = 30


@dataclass(frozen=True)
class Profile:
    """One step of one mode. Times are in ms; None where the host is the only device."""

    model: str
    mode: str
    step_ms: float
    device_busy_ms: float | None = None
    kernels: int | None = None
    host_share: float | None = None
    note: str = ""


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of the spans lasts; kernels that run at the same time on two streams count once."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def measure(name: str, mode: str, args: argparse.Namespace) -> Profile:
    family, shape = shape_of(name, args)
    note = MODES[mode].reason_missing(family, args.device)
    if note:
        return Profile(name, mode, 0.0, note=note)
    forward = MODES[mode].prepare(build(family, shape, args))
    step = make_step(forward, make_batch(args.batch, shape.vocab, args), args)
    for _ in range(2):
        step()
    step_ms = 1000 * statistics.median(timed(step, args.device) for _ in range(args.rounds))
    seen = _profiled(step, args.device)
    stem = f"{name}-{mode}".replace(" ", "-")
    replace_text(args.out / f"{stem}.txt", _tables(seen, args.device))
    seen.export_chrome_trace(str(args.out / f"{stem}.trace.json.gz"))
    if args.device == "cpu":
        return Profile(name, mode, step_ms)
    spans = [(e.time_range.start, e.time_range.end) for e in seen.events() if e.device_type == DeviceType.CUDA]
    device_ms = busy(spans) / 1000
    # the time of a step without the profiler, which slows down only the host
    return Profile(name, mode, step_ms, device_ms, len(spans), max(0.0, 1 - device_ms / step_ms))


def _profiled(step: Callable[[], None], device: str) -> Any:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as seen:
        timed(step, device)
    return seen


def _tables(seen: Any, device: str) -> str:
    orders = ["self_cpu_time_total", *(["self_cuda_time_total"] if device == "cuda" else [])]
    options = {"row_limit": ROWS, "max_name_column_width": 80}
    return "\n".join(f"by {order}\n{seen.key_averages().table(sort_by=order, **options)}" for order in orders)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--modes", nargs="+", choices=tuple(MODES), default=["stock", "exact"])
    args = parser.parse_args(argv)
    check_model_options(parser, args)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "recipes/profile_step.py", *(sys.argv[1:] if argv is None else argv)])
    about = environment(args.device, command, vars(args))
    found: list[Profile] = []
    for name in args.models:
        for mode in args.modes:
            found.append(measure(name, mode, args))
            replace_text(
                args.out / "profile.json", json.dumps({**about, "profiles": [asdict(p) for p in found]}, indent=2)
            )
    for p in found:
        share = "" if p.host_share is None else f", {p.kernels} kernels, device waits {p.host_share:.0%}"
        print(f"{p.model}, {p.mode}: {p.note or f'{p.step_ms:.1f} ms'}{share}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
