"""Lengths of a data set's samples, from a file, and the batches that they make."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .flags import MOST, one_length

_OPTION = "--lengths"
Lengths = Annotated[
    Path | None,
    typer.Option(
        help="Instead of --seq-len: a file with a data set's lengths in tokens; the longest batch counts.",
        callback=one_length,
    ),
]
# batches before the longest one; each length among them is a step to run
_BATCHES = 3


def lengths_in(path: Path | None) -> list[int]:
    """The lengths that a file holds: one whole number in a line, or a JSON list of them; none without a file.

    Raises:
        typer.BadParameter: The file cannot be read, holds no length, or holds something else.
    """
    if path is None:
        return []
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        raise _bad(path, f"it cannot be read: {error}") from error
    found: list[Any] = (
        _listed(path, text) if text.lstrip().startswith("[") else [_number(line) for line in text.split()]
    )
    if not found:
        raise _bad(path, "it is empty")
    return [_checked(path, place, value) for place, value in enumerate(found, 1)]


def _checked(path: Path, place: int, value: Any) -> int:
    if type(value) is not int or not 0 < value <= MOST:
        raise _bad(path, f"number {place} is {str(value)[:40]!r}, not a whole number from 1 to {MOST}")
    return value


def _listed(path: Path, text: str) -> list[Any]:
    try:
        return list(json.loads(text))
    except ValueError as error:
        raise _bad(path, f"it is not a JSON list: {error}") from error


def _number(text: str) -> int | str:
    """The number that the text is; any other text as it is, for the error message."""
    return int(text) if text.isdecimal() and len(text) < 20 else text


def _bad(path: Path, why: str) -> typer.BadParameter:
    said = f"{path}: {why}; pass a file with one length per line, or a JSON list of lengths"
    return typer.BadParameter(said, param_hint=_OPTION)


def steps_of(lengths: Sequence[int], batch_size: int) -> tuple[int, ...]:
    """Tokens per sequence of the first batches in the file's order, each as long as its longest sample, and then of
    the longest batch."""
    if not lengths:
        return ()
    batches = (lengths[i : i + batch_size] for i in range(0, min(len(lengths), _BATCHES * batch_size), batch_size))
    return (*map(max, batches), max(lengths))
