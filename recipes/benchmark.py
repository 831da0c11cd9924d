"""What patching saves and what it costs, compared with stock, gradient checkpointing, torch.compile and Liger.

    python recipes/benchmark.py --quick
    python recipes/benchmark.py --device cuda --models llama-1b --modes all --seq-len 2048 --out results/
    python recipes/benchmark.py --suite bytes --modes compile exact+compile int8+compile --dtype bfloat16 --resume
    python recipes/benchmark.py --device cuda --suite largest --models gpt2-small llama-1b --caps 8GiB 16GiB 24GiB

Suite "equal": each mode starts from the same weights, at one batch size. Every round runs each mode once, in turn, so
that other work on the machine affects all modes alike. The times are medians over the rounds, after a warm-up step of
each mode; on a CPU they are CPU seconds of all threads, and the least of them counts. Gradient errors and kept bytes
per layer are those of the same model with few layers. "peak MiB" is above weights and gradients, in a step that adds
to the gradients of the step before; "with new gradients" is above the weights alone, in a step that makes the
gradients, as after `zero_grad()`. A compiled backward returns all gradients at once, so its "peak MiB" contains them
beside those of the step before. A mode that should be exact and whose gradients differ gets no speed figure, and the
command fails. Suite "largest": the largest batch that trains with AdamW on a card of each size, and its tokens/s; on
a CPU the bytes are counted instead. Suite "bytes", for compiled modes: kept bytes, peak, error against fp64 (without
dropout) and the CPU seconds of the first step with empty caches; --resume continues after the results in --out. Suite
"host": what recipes/host_time.py measures, per layer of tiny models of the same families, in the modes of the
benchmark. Writes benchmark.jsonl (one record per result) and benchmark.md after each mode and each round, and
benchmark.png at the end. recipes/benchmark_kernels.py measures single kernels.
"""

import argparse
import shlex
import sys
from collections.abc import Iterator
from itertools import product

from common.bench_bytes import compiled_bytes, earlier
from common.bench_host import host_costs
from common.bench_modes import DEFAULT_MODES, MODES
from common.bench_options import add_model_options, check_model_options
from common.bench_report import environment, markdown, plot, write
from common.bench_suites import GRADIENT_LIMIT, Result, equal_batch, largest_batch
from tqdm.auto import tqdm


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--suite", nargs="+", choices=("equal", "largest", "bytes", "host"), default=["equal"])
    parser.add_argument("--modes", nargs="+", choices=("all", *MODES), default=list(DEFAULT_MODES))
    parser.add_argument("--caps", nargs="+", default=["8GiB", "12GiB", "16GiB", "24GiB"], help="card sizes, in GiB")
    parser.add_argument("--resume", action="store_true", help="suite bytes: do not measure what --out has already")
    parser.add_argument("--trials", type=int, default=4, help="batch sizes to try under each cap")
    args = parser.parse_args(argv)
    check_model_options(parser, args)
    if "host" in args.suite and args.device != "cpu":
        parser.error("--suite host: with --device cpu")
    if any(not cap.endswith("GiB") for cap in args.caps):
        parser.error("--caps are in GiB, as in 24GiB")
    args.modes = list(MODES) if "all" in args.modes else args.modes
    if args.quick:
        args.caps = ["0.02GiB"]
    return args


def run(args: argparse.Namespace) -> Iterator[list[Result]]:
    """Yields all results so far, each time that something has been measured."""
    done: list[Result] = earlier(args.out) if args.resume else []
    for name in tqdm(args.models, desc="models"):
        if "equal" in args.suite:
            results: list[Result] = []
            for results in equal_batch(name, args):
                yield [*done, *results]
            done += results
        if "bytes" in args.suite:
            yield from compiled_bytes(name, args, done)
        if "host" in args.suite:
            done += host_costs(name, args)
            yield done
        if "largest" in args.suite:
            for cap, mode in product(args.caps, args.modes):
                done.append(largest_batch(name, mode, cap, args))
                yield done


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    command = shlex.join(["python", "recipes/benchmark.py", *(sys.argv[1:] if argv is None else argv)])
    about = environment(args.device, command, vars(args))
    results: list[Result] = []
    for results in run(args):
        # so that a run which is interrupted leaves what it has measured
        write(results, about, args.out)
    print(markdown(results, about))
    plot(results, args.out / "benchmark.png", about)
    wrong = [f"{r.model} {r.mode}: {r.gradient_error:.1e}" for r in results if not r.correct]
    if wrong:
        limit = GRADIENT_LIMIT[args.grain]
        print(f"gradients differ from stock's beyond {limit}: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
