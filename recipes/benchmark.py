"""What patching saves and what it costs, beside stock, gradient checkpointing, torch.compile and Liger.

    python recipes/benchmark.py --quick
    python recipes/benchmark.py --device cuda --models llama-1b --modes all --seq-len 2048 --out results/
    python recipes/benchmark.py --device cuda --suite largest --models gpt2-small llama-1b --caps 8GiB 16GiB 24GiB

Suite "equal": each mode from the same weights, at one batch size. Every round runs each of them once, in turn, so that
what else the machine does falls on all alike; the figures are medians over the rounds, after one warm-up step each. A
mode that is to be exact and whose gradients are off gets no speed figure, and the command fails. Suite "largest": the
largest batch that trains with AdamW on a card of each size, and tokens/s there; on a CPU the bytes are counted instead.
Writes benchmark.jsonl (one record per result), benchmark.md and benchmark.png. The kernels alone are measured by
recipes/benchmark_kernels.py.
"""

import argparse
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from common.bench_models import FAMILIES, MODELS
from common.bench_modes import DEFAULT_MODES, MODES
from common.bench_report import environment, write
from common.bench_suites import GRADIENT_LIMIT, Result, equal_batch, largest_batch
from tqdm.auto import tqdm


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="+", choices=("equal", "largest"), default=["equal"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(FAMILIES), help="a family, or a shape")
    parser.add_argument("--modes", nargs="+", choices=("all", *MODES), default=list(DEFAULT_MODES))
    parser.add_argument("--dtype", choices=tuple(GRADIENT_LIMIT), default=None, help="float32 on a CPU, else bfloat16")
    parser.add_argument("--autocast", action="store_true", help="weights in float32, computation in bfloat16")
    parser.add_argument("--lora", action="store_true", help="adapters of rank 16 on all linear layers")
    parser.add_argument("--hidden", type=int, default=512, help="of a family without a shape")
    parser.add_argument("--layers", type=int, default=2, help="even; kept bytes are a slope to half of it")
    parser.add_argument("--vocab", type=int, default=1024, help="the loss head's share of the step grows with it")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--dropout", type=float, default=0.1, help="of the hidden states of BERT and GPT-2")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--caps", nargs="+", default=["8GiB", "12GiB", "16GiB", "24GiB"], help="card sizes, in GiB")
    parser.add_argument("--trials", type=int, default=4, help="batch sizes to try under each cap")
    parser.add_argument("--quick", action="store_true", help="hidden 128, sequence 64, 3 rounds, one small cap")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine or this torch has no CUDA device")
    if args.layers < 2 or args.layers % 2 or args.hidden % 64 or args.rounds < 1:
        parser.error("--layers must be even and at least 2, --hidden a multiple of 64, --rounds at least 1")
    if any(not cap.endswith("GiB") for cap in args.caps):
        parser.error("--caps are in GiB, as in 24GiB")
    args.dtype = args.dtype or ("float32" if args.device == "cpu" or args.autocast else "bfloat16")
    # the dtype whose rounding decides how closely two gradients can agree
    args.grain = "bfloat16" if args.autocast else args.dtype
    args.modes = list(MODES) if "all" in args.modes else args.modes
    if args.quick:
        args.hidden, args.seq_len, args.rounds, args.caps = 128, 64, 3, ["0.02GiB"]
    return args


def run(args: argparse.Namespace) -> Iterator[Result]:
    """All results, as they come."""
    for name in tqdm(args.models, desc="models"):
        if "equal" in args.suite:
            yield from equal_batch(name, args)
        if "largest" in args.suite:
            yield from (largest_batch(name, mode, cap, args) for cap in args.caps for mode in args.modes)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    command = shlex.join(["python", "recipes/benchmark.py", *(sys.argv[1:] if argv is None else argv)])
    about = environment(args.device, command, vars(args))
    results: list[Result] = []
    text = ""
    for result in run(args):
        results.append(result)
        # a run that is cut off leaves what it has measured
        text = write(results, about, args.out)
    print(text)
    wrong = [f"{r.model} {r.mode}: {r.gradient_error:.1e}" for r in results if not r.correct]
    if wrong:
        limit = GRADIENT_LIMIT[args.grain]
        print(f"gradients differ from stock's beyond {limit}: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
