"""What all commands share: exit codes, options, and functions that print."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from .quiet import only_our_words

# the class that typer uses, whichever library it comes from
UsageError: Any = typer.BadParameter.__mro__[1]


class Exit(IntEnum):
    """Exit codes of every command."""

    OK = 0
    DOES_NOT_FIT = 1
    USAGE = 2
    NO_MODEL = 3
    MISSING = 4
    FAILED = 5


EXIT_CODES = (
    "Exit codes: 0 all is well, 1 it does not fit, 2 the command was called wrongly, 3 the model or its config cannot "
    "be had or used, 4 something optional is not installed, 5 a step of the model failed "
    "(set ACTCOMPRESS_TRACEBACK to see where)."
)

# more than any training has, and few enough for bytes to fit into 64 bits
MOST = 2**24

# what --quantization takes; memory/estimation/quantized/formats.py says what they are
QUANTIZATIONS = ("nf4", "fp4", "int8")


def one_length(context: typer.Context, value: Any) -> Any:
    """The callback of --seq-len and --lengths, which exclude each other: the second one given finds the first."""
    if {getattr(context.get_parameter_source(name), "name", "") for name in ("seq_len", "lengths")} == {"COMMANDLINE"}:
        raise typer.BadParameter("--lengths takes the place of --seq-len: pass one of the two")
    return value


Model = Annotated[
    str, typer.Argument(help="A model of the Hugging Face hub, a folder with a config.json, or a bare config JSON.")
]
BatchSize = Annotated[int, typer.Option(min=1, max=MOST, help="Sequences in a batch on one device.")]
SeqLen = Annotated[int, typer.Option(min=1, max=MOST, help="Tokens in a sequence.", callback=one_length)]
Dtype = Annotated[str | None, typer.Option(help="Of the weights: bf16, fp16 or fp32; by default what the config says.")]
Bf16 = Annotated[bool, typer.Option("--bf16", help="As TrainingArguments(bf16=True): autocast over fp32 weights.")]
Fp16 = Annotated[bool, typer.Option("--fp16", help="The same with fp16.")]
Optimizer = Annotated[
    str,
    typer.Option(
        "--optimizer", "--optim", help="adamw, adamw_8bit, adafactor, sgd; or what `optim` of the Trainer takes."
    ),
]
Lora = Annotated[bool, typer.Option("--lora", help="LoRA on all linear layers; the rest is frozen. Needs peft.")]
LoraRank = Annotated[
    int | None, typer.Option("--lora-rank", "--lora-r", min=1, max=MOST, help="Rank of LoRA; implies --lora.")
]
Quantization = Annotated[
    str | None, typer.Option(help="Of the frozen weights: nf4, fp4 or int8; by default what the config says.")
]
Qlora = Annotated[bool, typer.Option("--qlora", help="The same as --quantization nf4 --lora.")]
MaxContext = Annotated[
    bool, typer.Option("--max-context", help="Also the longest sequences that fit on --gpu, at --batch-size.")
]
Gpu = Annotated[
    str | None,
    typer.Option(
        help="The card, as rtx4090, a100-80gb, t4; or what it has: 24, 24G, 24GB (10^9 bytes each), 22GiB (2^30)."
    ),
]
Device = Annotated[str, typer.Option(help="cuda or cpu: by whose rules.")]
Engine = Annotated[str, typer.Option(help="eager, or compile: under torch.compile, where the model is one graph.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="By a formula, in less than a second, within 3%; for the most common models.")
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Compute it anew, and keep no answer for the next time.")]
Fsdp = Annotated[
    int, typer.Option(min=1, max=MOST, help="Processes over which FSDP2 shards; the figures are those of one.")
]
Zero = Annotated[
    int | None, typer.Option(min=2, max=3, help="Stage of DeepSpeed's ZeRO over --processes; the figures are of one.")
]
Processes = Annotated[int, typer.Option(min=1, max=MOST, help="Over which --zero divides; without --zero: of DDP.")]
Trl = Annotated[bool, typer.Option("--trl", help="The loss of TRL's trainers, whose fused head makes no logits whole.")]
TargetLen = Annotated[
    int | None,
    typer.Option(min=1, max=MOST, help="Tokens of the labels of an encoder-decoder model; by default --seq-len."),
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that the model's repository brings, if it does.")
]
Html = Annotated[Path | None, typer.Option(help="Also write one self-contained page.")]


def lora_of(lora: bool, rank: int | None) -> bool | int | None:
    """The value of `estimate`'s argument `lora`."""
    return rank if rank is not None else lora or None


def quantization_of(name: str | None, qlora: bool) -> str | None:
    """The value of `estimate`'s argument `quantization`. Raises UnknownOptionError for another name."""
    from ..errors import UnknownOptionError

    if name is not None and name not in QUANTIZATIONS:
        raise UnknownOptionError("quantization", name, QUANTIZATIONS)
    return name or ("nf4" if qlora else None)


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn errors into a message and an exit code. The console script has it around every command."""
    from ..errors import (
        ActCompressError,
        DoesNotFitError,
        MeasurementError,
        MissingExtraError,
        ModelConfigError,
        NothingPatchedError,
        UnsupportedModelError,
    )

    codes: dict[type[ActCompressError], Exit] = {DoesNotFitError: Exit.DOES_NOT_FIT, MissingExtraError: Exit.MISSING}
    of_model = (ModelConfigError, MeasurementError, NothingPatchedError, UnsupportedModelError)
    try:
        with only_our_words():
            yield
    except ActCompressError as error:
        code = Exit.NO_MODEL if isinstance(error, of_model) else Exit.USAGE
        fail(str(error), codes.get(type(error), code))
    except (typer.Exit, typer.Abort, UsageError, BrokenPipeError):
        raise
    except Exception as error:
        if os.environ.get("ACTCOMPRESS_TRACEBACK"):
            raise
        fail(f"{type(error).__name__}: {' '.join(str(error).split())[:400]}", Exit.FAILED)


def fail(message: str, code: Exit) -> None:
    """Print a message on stderr and end the program."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)


def card_option(text: str | None) -> int | None:
    """The value of --gpu in bytes."""
    if text is None:
        return None
    from ..quick.cards import card_bytes

    try:
        return card_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--gpu") from error


def precision(dtype: str | None, bf16: bool, fp16: bool) -> tuple[str | None, str | None]:
    """(dtype of the weights, dtype of autocast)."""
    if bf16 and fp16:
        raise typer.BadParameter("--bf16 and --fp16 exclude each other")
    if dtype == "":
        raise typer.BadParameter("it is empty; pass bf16, fp16 or fp32", param_hint="--dtype")
    autocast = "bfloat16" if bf16 else "float16" if fp16 else None
    return dtype or ("float32" if autocast else None), autocast


def writable(name: str, path: Path | None) -> Path | None:
    """The file to write, with ~ expanded. That it cannot be written is reported before the work starts.

    Args:
        name: The option that names the file.
        path: Its value.
    """
    if path is None:
        return None
    # Path.expanduser raises for a user that does not exist
    target = Path(os.path.expanduser(path)).absolute()
    if why := _unwritable(target):
        raise typer.BadParameter(f"cannot write {target}: {why}", param_hint=name)
    return target


def _unwritable(target: Path) -> str | None:
    """Why a file cannot be written, and what to do; None if it can. Nothing is opened: it may be a pipe."""
    try:
        target.stat()
        place = target
    except FileNotFoundError:
        place = target.parent
    except OSError as error:
        # a name that is too long, or a path through a file
        return f"{error.strerror}; name another file"
    if not target.parent.is_dir():
        return f"there is no folder {target.parent}; make it first"
    if target.is_dir():
        return "it is a folder; name a file in it"
    return None if os.access(place, os.W_OK) else f"no permission to write to {place}; name another file"


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Show what takes time, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


def progress(what: str) -> None:
    """Print what is being done where `busy` shows nothing: in the log of a pipe."""
    if not sys.stderr.isatty():
        typer.echo(what, err=True)


def echo_json(data: Any) -> None:
    """Print JSON on stdout, which gets nothing else."""
    typer.echo(json.dumps(data, indent=2))


def show(found: Any, as_json: bool, assumptions: str) -> None:
    """Print a report, and what its figures depend on: as one more line, or as one more field of the JSON."""
    if as_json:
        echo_json({**json.loads(found.to_json()), "assumed": assumptions})
        return
    found.print()
    typer.echo(f"assumed: {assumptions}")


class Rows:
    """A table as aligned plain text, in which each row can be printed as soon as it is known.

    Args:
        widths: Column name -> the least width.
        right: Names of the columns that are aligned to the right.
    """

    def __init__(self, widths: Mapping[str, int], right: Sequence[str] = ()) -> None:
        self._widths, self._right = widths, right

    def line(self, row: Sequence[str]) -> str:
        """A row as text. The column names are formatted by it, too."""
        cells = (
            text.rjust(max(width, len(column))) if column in self._right else text.ljust(max(width, len(column)))
            for (column, width), text in zip(self._widths.items(), row, strict=True)
        )
        return "  ".join(cells).rstrip()

    def echo(self, row: Sequence[str]) -> None:
        """Print a row."""
        typer.echo(self.line(row))
