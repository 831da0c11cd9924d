"""`hf-actcompress bench`: runs the benchmark of the recipes, which are not in the wheel."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from . import flags
from .common import Exit, echo_json, fail

Recipe = Annotated[Path | None, typer.Option(help="Path of recipes/benchmark.py, if it is not found by itself.")]


def bench(context: typer.Context, recipe: Recipe = None, as_json: flags.Json = False) -> None:
    """Measure kept bytes, peak, step time and gradient error here.

    Runs recipes/benchmark.py, which is part of a checkout and not of the wheel; it is looked for in the working
    directory and, in a checkout, next to the package. Options that are not listed here are passed on to it, such as
    --quick, --device cuda or --models llama. The exit code is that of the recipe.
    """
    found = recipe if recipe is not None else find_recipe()
    if found is None or not found.is_file():
        fail(
            f"{found or 'recipes/benchmark.py'} was not found: run this in a checkout of the source, or pass its "
            "path with --recipe",
            Exit.MISSING,
        )
        return
    command = [sys.executable, str(found), *context.args]
    if not as_json:
        raise typer.Exit(subprocess.run(command).returncode)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(_value(context.args, "--out") or folder)
        if out == Path(folder):
            command += ["--out", folder]
        # only the records go to stdout
        code = subprocess.run(command, stdout=sys.stderr.fileno()).returncode
        records = out / "benchmark.jsonl"
        echo_json([json.loads(line) for line in records.read_text().splitlines()] if records.exists() else [])
    raise typer.Exit(code)


def find_recipe() -> Path | None:
    """recipes/benchmark.py of the working directory, or of the checkout that has this package; None without one."""
    places = (Path.cwd(), Path(__file__).resolve().parents[2])
    return next((path for place in places if (path := place / "recipes" / "benchmark.py").is_file()), None)


def _value(arguments: list[str], option: str) -> str | None:
    """The value of an option among arguments that are passed on; None if it is missing."""
    for index, argument in enumerate(arguments):
        if argument == option and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2]
    return None
