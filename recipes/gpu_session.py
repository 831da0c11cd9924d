"""Everything that needs a GPU, in one command of under nine minutes: correctness first, then kernels, then models.

    python recipes/gpu_session.py --out recipes/results/gpu
    python recipes/gpu_session.py --rehearse --out /tmp/rehearsal      # the same commands on a CPU, at tiny sizes

Each job has a time limit and writes its results as it goes, so that a session that ends early leaves what it has
measured; a job that fails or is cut off is named in session.json and the rest still runs. --jobs runs some alone.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_MODES = ["stock", "checkpointing", "liger", "liger+checkpointing", "exact", "int8", "int4", "exact+checkpointing"]
_COMPILED = ["stock", "compile", "compile, budget 0.5", "exact+compile"]


@dataclass(frozen=True)
class Job:
    """A command below the repository's root, without the options that all share."""

    name: str
    command: tuple[str, ...]
    seconds: int


def _benchmark(name: str, seconds: int, *options: str) -> Job:
    return Job(name, ("recipes/benchmark.py", *options), seconds)


JOBS = (
    Job("correctness", ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"), 80),
    Job("kernels", ("recipes/benchmark_kernels.py", "--automatic"), 70),
    # per shape: a weight gradient out of what is stored, by a kernel or by a pass and torch's product
    Job("weight-gradients", ("recipes/benchmark_kernels.py", "--on-request"), 55),
    _benchmark("llama-1b", 65, "--models", "llama-1b", "--batch", "2", "--seq-len", "2048", "--modes", *_MODES),
    _benchmark("gpt2", 35, "--models", "gpt2-small", "--batch", "8", "--seq-len", "1024", "--modes", *_MODES),
    _benchmark("bert-large", 35, "--models", "bert-large", "--batch", "8", "--seq-len", "512", "--modes", *_MODES),
    _benchmark("lora", 35, "--models", "llama-1b", "--lora", "--batch", "2", "--seq-len", "2048", "--modes", *_MODES),
    _benchmark("compiled", 60, "--models", "llama-1b", "--batch", "2", "--seq-len", "2048", "--modes", *_COMPILED),
    _benchmark(
        "largest", 50, "--suite", "largest", "--models", "gpt2-small", "--seq-len", "1024", "--caps", "24GiB",
        "--modes", "stock", "checkpointing", "exact", "int8", "int4",
    ),
    *(
        _benchmark(
            f"tempo-{length}", 27, "--suite", "largest", "--models", "bert-large", "--seq-len", length,
            "--caps", "12GiB", "--modes", "stock", "tempo", "exact",
        )
        for length in ("128", "512")
    ),
)  # fmt: skip


def run(job: Job, args: argparse.Namespace) -> dict[str, object]:
    """Run a job within its limit; its output goes to a file."""
    options: list[str] = []
    if job.name != "correctness":
        rounds = ["--rounds", "5"] if "recipes/benchmark.py" in job.command else []
        options = [*rounds, "--device", "cuda", "--out", str(args.out / job.name)]
        if args.rehearse:
            options = [*rounds, "--device", "cpu", "--quick", "--out", str(args.out / job.name)]
    wanted = _rehearsed(job.command) if args.rehearse else job.command
    command = [sys.executable, *wanted, *options]
    began = time.perf_counter()
    with (args.out / f"{job.name}.log").open("w") as log:
        try:
            limit = None if args.rehearse else job.seconds
            status = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            status = -1
    seconds = round(time.perf_counter() - began, 1)
    # without a GPU pytest finds nothing to run, and says so by 5
    ok = status == 0 or (args.rehearse and job.name == "correctness" and status == 5)
    ending = "ok" if ok else "cut off" if status == -1 else f"exit status {status}"
    print(f"{job.name}: {ending}, {seconds} s", flush=True)
    return {**asdict(job), "command": shlex.join(["python", *command[1:]]), "status": status, "ok": ok, "took": seconds}


def _rehearsed(command: Sequence[str]) -> list[str]:
    """The same with models of --quick's size: the published shapes would take a CPU hours."""
    family = {"llama-1b": "llama", "gpt2-small": "gpt2", "bert-large": "bert"}
    compiled = {"compile", "compile, budget 0.5", "exact+compile"}
    return [family.get(word, word) for word in command if word not in compiled]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the jobs in order; the exit status is 1 if any did not end well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", nargs="+", choices=[job.name for job in JOBS], default=[job.name for job in JOBS])
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, tiny, without torch.compile and time limits")
    args = parser.parse_args(argv)
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    done = []
    for job in JOBS:
        if job.name in args.jobs:
            done.append(run(job, args))
            (args.out / "session.json").write_text(json.dumps(done, indent=2) + "\n")
    return int(not all(job["ok"] for job in done))


if __name__ == "__main__":
    sys.exit(main())
