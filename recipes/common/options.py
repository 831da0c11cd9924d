"""The command line that all recipes share, and the checks that argparse cannot make."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from hf_actcompress import PRESETS

DEFAULT_CACHE = Path("~/.cache/hf_actcompress").expanduser()


def positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """An argparse type: a number of `kind` above zero."""

    def parse(text: str) -> float:
        value = kind(text)
        if value <= 0:
            raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
        return value

    parse.__name__ = f"positive {kind.__name__}"  # argparse names the type in its error
    return parse


def probability(text: str) -> float:
    """An argparse type: a number in [0, 1)."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be in [0, 1), got {text}")
    return value


def build_parser(description: str, configs: Sequence[str]) -> argparse.ArgumentParser:
    """The options of every recipe; `configs` are the tiny models it can build, the default one first."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    _add_model_options(parser, configs)
    _add_data_options(parser)
    _add_training_options(parser)
    _add_run_options(parser)
    return parser


def _add_model_options(parser: argparse.ArgumentParser, configs: Sequence[str]) -> None:
    group = parser.add_argument_group("model")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--model", help="hub name, or a folder written by save_pretrained (with its tokenizer)")
    source.add_argument("--config", choices=configs, default=configs[0], help="a small model with fresh weights")
    group.add_argument("--vocab-size", type=positive(int), default=4096, help="of the tokenizer trained for --config")
    group.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the weights")
    group.add_argument("--preset", choices=list(PRESETS), default="exact", help="what is kept for backward")
    group.add_argument("--compile-layers", action="store_true", help="let Inductor make the code of patched layers")
    group.add_argument("--lora", action="store_true", help="train adapters on all linear layers (needs peft)")
    group.add_argument("--lora-r", type=positive(int), default=8)
    group.add_argument("--lora-dropout", type=probability, default=0.0)
    group.add_argument("--gradient-checkpointing", action="store_true", help="recompute each layer in backward")


def _add_data_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data (default: the source code of Python's standard library)")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--dataset", help="hub name or local folder, read by datasets.load_dataset")
    source.add_argument("--text-files", metavar="GLOB", help="text files, quoted, e.g. 'notes/**/*.md'")
    group.add_argument("--dataset-config", help="the dataset's configuration name")
    group.add_argument("--text-column", default="text")
    group.add_argument("--max-documents", type=positive(int), help="read no more than this many documents")
    group.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE, help="trained tokenizers and tokenized text")


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--max-steps", type=positive(int), default=80, help="optimizer steps")
    group.add_argument("--batch-size", type=positive(int), default=8, help="sequences per process and micro-batch")
    group.add_argument("--seq-len", type=positive(int), default=256, help="tokens")
    group.add_argument("--gradient-accumulation-steps", type=positive(int), default=1)
    group.add_argument("--lr", type=positive(float), default=1e-3, help="highest learning rate")
    group.add_argument("--warmup", type=int, default=10, help="steps of linear warm-up, then cosine to a tenth")
    group.add_argument("--weight-decay", type=float, default=0.1)
    group.add_argument("--max-grad-norm", type=positive(float), default=1.0)
    group.add_argument("--mixed-precision", choices=("no", "bf16", "fp16"), help="None: as `accelerate launch` says")
    group.add_argument("--eval-batches", type=positive(int), default=8, help="micro-batches of each evaluation")
    group.add_argument("--seed", type=int, default=0)


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument("--output-dir", type=Path, help="for checkpoints, the model and comparisons [runs/RECIPE]")
    group.add_argument("--save-every", type=positive(int), help="write a checkpoint every so many steps")
    group.add_argument("--resume", type=Path, metavar="CHECKPOINT", help="a folder written by --save-every")
    group.add_argument("--compare", action="store_true", help="run stock and patched from one seed, side by side")
    group.add_argument("--control", action="store_true", help="with --compare: measure what rounding alone does")


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, checkpoint_file: str = "progress.json"
) -> argparse.Namespace:
    """Parse, and reject what cannot work before anything is loaded. `checkpoint_file` marks a checkpoint's folder."""
    args = parser.parse_args(argv)
    if args.output_dir is None:
        args.output_dir = Path("runs") / parser.prog.removesuffix(".py")
    if args.lora_dropout and not args.lora:
        parser.error("--lora-dropout needs --lora")
    if args.control and not args.compare:
        parser.error("--control needs --compare")
    if args.compare and (args.resume or args.save_every):
        parser.error("--compare trains from the start and writes no checkpoints: drop --resume and --save-every")
    if args.dataset_config and not args.dataset:
        parser.error("--dataset-config needs --dataset")
    if args.resume and not (args.resume / checkpoint_file).is_file():
        parser.error(f"--resume {args.resume}: no checkpoint there (it would hold a {checkpoint_file})")
    if args.mixed_precision == "fp16" and not torch.cuda.is_available():
        parser.error("--mixed-precision fp16 needs a GPU: its gradient scaler does not run on a CPU. Try bf16")
    return args
