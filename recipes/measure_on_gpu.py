"""Runs everything that needs a GPU, in one command: correctness first, then speed, the most valuable jobs first.

    python recipes/measure_on_gpu.py --out results/gpu --wheels wheels/
    python recipes/measure_on_gpu.py --rehearse --out /tmp/rehearsal        # the same jobs on a CPU, at tiny sizes

The package need not be installed: the checkout that has this file is measured. Tests and comparisons, which measure no
time, run side by side at first; all others run alone. Each job has a time limit and writes its results as it goes:
after each mode, round, kernel or model type. One archive (OUT.tar.gz, or --archive) has all results. It is written anew
while the jobs run, so that a session that is killed leaves what it has measured. session.json and the console name each
job that fails or is stopped, and the others still run. --jobs runs only some jobs, --minutes limits the whole session.
"""

import argparse
import importlib.util
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from common.files import replace_text
from common.session import ROOT, Archive, Ended, Job, run, unpack_wheels
from common.versions import PEERS, about_this_run

_MODES = ("stock", "checkpointing", "liger", "liger+checkpointing", "exact", "exact+checkpointing", "int8", "int4")
_COMPILED = ("stock", "compile", "exact+compile", "int8+compile", "exact layers-compiled", "int8 layers-compiled")
_ROUNDS = ("--rounds", "7")
# in seconds: a job is not started with less time left
MINIMUM = 5.0
# models and sizes that are the same for all modes: Llama-3.2-1B, its LoRA, BERT and GPT-2 as they are trained
_SETTINGS: dict[str, tuple[str, ...]] = {
    "llama-1b": ("--models", "llama-1b", "--batch", "2", "--seq-len", "2048"),
    "lora": ("--models", "llama-1b", "--lora", "--batch", "2", "--seq-len", "2048"),
    "bert-base": ("--models", "bert-base", "--batch", "16", "--seq-len", "128"),
    "bert-large": ("--models", "bert-large", "--batch", "8", "--seq-len", "512"),
    "gpt2": ("--models", "gpt2-small", "--batch", "8", "--seq-len", "1024"),
    "long": ("--models", "llama-1b", "--lora", "--batch", "1", "--seq-len", "8192"),
}
# what a long context costs: copies to the host that overlap with the layers, and tiles
_LONG = ("stock", "checkpointing", "exact+checkpointing", "offload", "long+checkpointing")


def _processes(count: int) -> tuple[str, ...]:
    """The options with which tests run in parallel, if pytest can."""
    return ("-n", str(count)) if importlib.util.find_spec("xdist") else ()


def _kernel_tests() -> Job:
    """Every kernel's tests, on the GPU; compiling for other GPUs needs none. A CPU interprets a sample of them."""
    pytest = ("-m", "pytest", "-v", "-p", "no:cacheprovider")
    tests = ("tests/kernels", "--ignore", "tests/kernels/test_aot.py", *_processes(12))
    sample = ("tests/kernels/test_rope.py", "tests/kernels/test_models.py", *_processes(2))
    return Job("kernel-tests", (*pytest, *tests), 100, shared=False, rehearsed=(*pytest, *sample), timed=False)


def _device_tests() -> Iterator[Job]:
    """The tests that are skipped without a GPU. Only their files are collected, because collecting all takes longer.

    Those of compiled models are a job of their own, because each of them compiles for half a minute.
    """
    tests = ROOT / "tests"
    files = sorted(str(p.relative_to(ROOT)) for p in tests.rglob("test_*.py") if "mark.gpu" in p.read_text())
    options = ("-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider")
    for name, compiled, processes, seconds in (("device-tests", False, 6, 60), ("compile-tests", True, 12, 150)):
        chosen = (file for file in files if ("compile" in file) == compiled)
        # pytest ends with status 5 if all tests are deselected, but not if all are skipped
        yield Job(name, (*options, *_processes(processes), *chosen), seconds, shared=False, timed=False)


def _speed(name: str, modes: Sequence[str], seconds: int) -> Job:
    job = f"{name}-compiled" if modes is _COMPILED else name
    return Job(job, ("recipes/benchmark.py", *_SETTINGS[name], *_ROUNDS, "--modes", *modes), seconds)


def _largest(name: str, cap: str, seconds: int, *options: str) -> Job:
    modes = ("stock", "checkpointing", "liger", "exact", "exact+checkpointing", "int8", "int4")
    sizes = ("--suite", "largest", "--caps", cap, "--rounds", "2", "--modes", *modes)
    return Job(f"largest-{name}-{cap}", ("recipes/benchmark.py", *options, *sizes), seconds)


JOBS = (
    _kernel_tests(),
    *_device_tests(),
    Job("families", ("recipes/compare_families.py",), 90, timed=False),
    *(_speed(name, _MODES, 45) for name in _SETTINGS if name != "long"),
    _speed("llama-1b", _COMPILED, 120),
    _largest("gpt2", "24GiB", 45, "--models", "gpt2-small", "--seq-len", "1024"),
    _largest("bert-large", "12GiB", 45, "--models", "bert-large", "--seq-len", "512"),
    _largest("lora", "12GiB", 45, "--models", "llama-1b", "--lora", "--seq-len", "2048"),
    Job("kernels", ("recipes/benchmark_kernels.py", "--automatic"), 75),
    Job("packed", ("recipes/packed_batches.py", "--model", "llama-1b", "--dtype", "bfloat16"), 45),
    _speed("long", _LONG, 60),
    *(
        Job(f"profile-{name}", ("recipes/profile_step.py", *_SETTINGS[name], "--modes", "stock", "exact", "int8"), 45)
        for name in ("bert-base", "llama-1b")
    ),
    # what `auto` times per shape: weight gradients from stored data, by a kernel or by unpacking and torch's product
    Job("weight-gradients", ("recipes/benchmark_kernels.py", "--timed"), 60),
    *(_speed(name, _COMPILED, 90) for name in ("bert-base", "gpt2", "lora", "bert-large")),
    # compares estimates with the measurements; it needs no GPU and can be run again later
    Job("estimates", ("recipes/compare_estimates.py",), 60),
)
NAMES = [job.name for job in JOBS]


def command(job: Job, args: argparse.Namespace) -> list[str]:
    """The job's command with the options that all jobs share."""
    if job.name == "estimates":
        return [*job.command, "--results", str(args.out), "--out", str(args.out / job.name)]
    if not job.shared:
        return list((args.rehearse and job.rehearsed) or job.command)
    where = ["--device", "cpu", "--quick"] if args.rehearse else ["--device", "cuda"]
    return [*job.command, *where, "--out", str(args.out / job.name)]


def groups(args: argparse.Namespace) -> list[list[Job]]:
    """The jobs in their order. Those that measure no time run side by side at first; in a rehearsal one by one."""
    chosen = [job for job in JOBS if job.name in args.jobs]
    checks = [job for job in chosen if not job.timed and not args.rehearse]
    return [*([checks] if checks else []), *([job] for job in chosen if job not in checks)]


def _run(job: Job, args: argparse.Namespace, archive: Archive, end: float) -> Ended:
    wanted, limit = command(job, args), min(args.scale * job.seconds, end - time.monotonic())
    if limit < MINIMUM:
        return Ended(job.name, shlex.join(["python", *wanted]), 0.0, 0.0, None, "not started: time was up")
    return run(job, wanted, args.out / f"{job.name}.log", limit, args.site, archive)


def run_jobs(args: argparse.Namespace, archive: Archive) -> list[Ended]:
    """The jobs in their order, until time is up."""
    about = about_this_run(shlex.join(["python", "recipes/measure_on_gpu.py", *args.argv]), args.site)
    missing = [name for name in PEERS if about[name] == "not installed"]
    print(f"{about['device']}; missing: {', '.join(missing) or 'nothing'}", flush=True)
    end = time.monotonic() + 60 * args.minutes
    done: list[Ended] = []
    for group in groups(args):
        with ThreadPoolExecutor(len(group)) as pool:
            for future in as_completed([pool.submit(_run, job, args, archive, end) for job in group]):
                ended = future.result()
                print(f"{ended.name}: {ended.ending}, {ended.took} s", flush=True)
                done.append(ended)
                record = {**about, "missing": missing, "jobs": [ended.record() for ended in done]}
                replace_text(args.out / "session.json", json.dumps(record, indent=2) + "\n")
        archive.refresh(now=True)
    return done


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--archive", type=Path, help="by default OUT.tar.gz beside the folder")
    parser.add_argument("--wheels", type=Path, help="folder of wheels (liger-kernel, peft, ...) that are not installed")
    parser.add_argument("--jobs", nargs="+", choices=NAMES, default=NAMES, metavar="JOB", help=", ".join(NAMES))
    parser.add_argument("--minutes", type=float, default=None, help="for all jobs: 9 by default, 60 for a rehearsal")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, tiny, with four times the jobs' limits")
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    args.out = args.out.resolve()
    args.archive = (args.archive or args.out.with_name(f"{args.out.name}.tar.gz")).resolve()
    args.scale = 4 if args.rehearse else 1
    args.minutes = args.minutes or (60 if args.rehearse else 9)
    args.site = args.out.with_name(f"{args.out.name}-site") if args.wheels else None
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the jobs; the exit status is 1 if any did not end well."""
    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    args.archive.parent.mkdir(parents=True, exist_ok=True)
    if args.wheels:
        unpack_wheels(args.wheels, args.site)
    archive = Archive(args.out, args.archive)
    try:
        done = run_jobs(args, archive)
    finally:
        archive.refresh(now=True)
    print(f"results: {args.archive}")
    return int(not all(ended.ok for ended in done))


if __name__ == "__main__":
    sys.exit(main())
