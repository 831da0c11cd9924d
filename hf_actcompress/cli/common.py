"""What all commands share: exit codes, and functions that print."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any

import typer

from .. import errors
from .process import only_our_words

# the class that typer uses, whichever library it comes from
UsageError: Any = typer.BadParameter.__mro__[1]


# columns of a terminal
_WIDTH = 80


class Exit(IntEnum):
    """Exit codes of every command."""

    OK = 0
    DOES_NOT_FIT = 1
    NOT_RIGHT = 1
    USAGE = 2
    NO_MODEL = 3
    MISSING = 4
    FAILED = 5


EXIT_CODES = (
    "Exit codes: 0 success, 1 it does not fit (doctor: the step is not right), 2 wrong usage, 3 the model or its "
    "config cannot be found or used, 4 an optional dependency is missing, 5 a step of the model failed (set "
    "ACTCOMPRESS_TRACEBACK to see where)."
)
_CODES = {errors.DoesNotFitError: Exit.DOES_NOT_FIT, errors.MissingExtraError: Exit.MISSING}
_OF_MODEL = (
    errors.ModelConfigError, errors.MeasurementError, errors.NothingPatchedError, errors.UnsupportedModelError,
)  # fmt: skip


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn errors into a message and an exit code. The console script has it around every command."""
    try:
        with only_our_words():
            yield
    except errors.ActCompressError as error:
        code = Exit.NO_MODEL if isinstance(error, _OF_MODEL) else Exit.USAGE
        fail(str(error), _CODES.get(type(error), code))
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


def writable(name: str, path: Path | None) -> Path | None:
    """The file that the option of this name gives, with ~ expanded. If it cannot be written, that is reported before
    the work starts.
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
        return f"{error.strerror}; choose another file"
    if not target.parent.is_dir():
        return f"there is no folder {target.parent}; create it first"
    if target.is_dir():
        return "it is a folder; give the name of a file in it"
    return None if os.access(place, os.W_OK) else f"no permission to write to {place}; choose another file"


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


def wrote(path: Path) -> None:
    """Say which file was written, on stderr, because stdout may be JSON."""
    typer.echo(f"wrote {path}", err=True)


def patch_code(
    preset: str | None, checkpointing: bool = False, checkpoint_input: str | None = None, *, diffusion: bool = False
) -> str:
    """The lines that make a model, of transformers or of diffusers, train so."""
    enable = "enable_gradient_checkpointing" if diffusion else "gradient_checkpointing_enable"
    lines = [f"model.{enable}()"] if checkpointing else []
    if preset is None:
        return "\n".join(lines)
    config, names = f'"{preset}"', "patch_model"
    if checkpoint_input is not None:
        config = f'CompressionConfig.from_preset({config}, checkpoint_input="{checkpoint_input}")'
        names = "CompressionConfig, patch_model"
    return "\n".join([f"from hf_actcompress import {names}", *lines, f"patch_model(model, {config})"])


def indented(code: str) -> str:
    """Code below a line of text."""
    return "\n".join(f"    {line}" for line in code.splitlines())


def echo_json(data: Any) -> None:
    """Print JSON on stdout, which gets nothing else."""
    typer.echo(json.dumps(data, indent=2))


def show(found: Any, as_json: bool, assumptions: str) -> None:
    """Print a report, and what its figures depend on: as one more line, or as one more field of the JSON."""
    if as_json:
        echo_json({**json.loads(found.to_json()), "assumed": assumptions})
        return
    found.print()
    typer.echo(wrapped(f"assumed: {assumptions}"))


class Rows:
    """A table as aligned plain text, in which each row can be printed as soon as it is known.

    Args:
        widths: Column name -> its width.
        right: Names of the columns that are aligned to the right.
    """

    def __init__(self, widths: Mapping[str, int], right: Sequence[str] = ()) -> None:
        self._widths, self._right = widths, right

    def line(self, row: Sequence[str]) -> str:
        """A row as text. The column names are formatted by it, too."""
        cells = (
            text.rjust(width) if column in self._right else text.ljust(width)
            for (column, width), text in zip(self._widths.items(), row, strict=True)
        )
        return "  ".join(cells).rstrip()


def wrapped(line: str, indent: str = "  ") -> str:
    """A line of prose in lines that a terminal of 80 columns shows whole; those below the first are indented."""
    return textwrap.fill(line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
