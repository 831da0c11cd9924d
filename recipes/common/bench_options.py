"""The options of every recipe that builds the benchmark's models: which, of what size, where."""

import argparse
from pathlib import Path

import torch

from .bench_models import FAMILIES, MODELS
from .bench_suites import GRADIENT_LIMIT


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(FAMILIES), help="a family, or a shape")
    parser.add_argument("--dtype", choices=tuple(GRADIENT_LIMIT), default=None, help="float32 on a CPU, else bfloat16")
    parser.add_argument("--autocast", action="store_true", help="weights in float32, computation in bfloat16")
    parser.add_argument("--lora", action="store_true", help="adapters of rank 16 on all linear layers")
    parser.add_argument("--lora-dropout", type=float, default=0.0, help="in front of the adapters")
    parser.add_argument("--hidden", type=int, default=512, help="of a family without a shape")
    parser.add_argument("--layers", type=int, default=2, help="even")
    parser.add_argument("--vocab", type=int, default=1024, help="the loss head's share of the step grows with it")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--dropout", type=float, default=0.1, help="of the hidden states of BERT and GPT-2")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--quick", action="store_true", help="every model with hidden 128 and two layers, batch 2 x 64, 3 rounds"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))


def check_model_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the command if options are impossible together, and fill in what depends on other options."""
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine or this torch has no CUDA device")
    if args.layers < 2 or args.layers % 2 or args.hidden % 64 or args.rounds < 1:
        parser.error("--layers must be even and at least 2, --hidden a multiple of 64, --rounds at least 1")
    args.dtype = args.dtype or ("float32" if args.device == "cpu" or args.autocast else "bfloat16")
    # the dtype whose rounding decides how closely two gradients can agree
    args.grain = "bfloat16" if args.autocast else args.dtype
    if args.quick:
        args.hidden, args.layers, args.vocab, args.batch, args.seq_len, args.rounds = 128, 2, 1024, 2, 64, 3
