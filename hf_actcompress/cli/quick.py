"""`hf-actcompress estimate --quick`: the same table by the formula, without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from ..errors import ModelConfigError
from ..quick.config_rules import check_config
from ..quick.formula import QuickEstimate, largest, longest
from ..quick.headroom import HEADROOM, usable
from ..quick.question import MOST_UNPACKED, Question, question
from .assumptions import assumed
from .common import Exit, Rows, echo_json
from .estimate_table import RIGHT, EstimateTable
from .remedies import STRATEGY, Remedy, as_lines, changes_of
from .strategies import MOST


def _row(strategy: str, asked: Question, table: EstimateTable) -> dict[str, Any]:
    """The row of a strategy, with the keys of `estimate --json`."""

    def answer(batch_size: int, seq_len: int) -> QuickEstimate:
        return asked.answer(strategy, batch_size, seq_len, table.options["optimizer"])

    found, room = answer(table.batch_size, table.seq_len), table.room
    row: dict[str, Any] = {"peak_bytes": found.device_bytes, "kept_bytes": found.kept_bytes, "estimate": asdict(found)}
    if room is not None:
        fits = found.device_bytes <= room
        row |= {"fits": fits, "tight": fits and found.device_bytes > usable(room, HEADROOM)}
        row["largest_batch_size"] = largest(lambda b: answer(b, table.seq_len).device_bytes, room, MOST)
        if table.max_context:
            most = asked.most_tokens
            row["longest_sequences"] = longest(lambda s: answer(table.batch_size, s).device_bytes, room, most)
    return row | {"strategy": strategy}


def config_of(model: str) -> dict[str, Any]:
    """The config.json of a folder, a file, or a model of the hub.

    Raises:
        ModelConfigError: There is no such config, or it is not a JSON object.
    """
    path = Path(os.path.expanduser(model))
    path = path / "config.json" if os.path.isdir(path) else path
    if not os.path.exists(path) and path.suffix != ".json" and model.count("/") <= 1:
        path = _of_hub(model)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelConfigError(f"no config can be read from {path}: {error}") from error
    if not isinstance(found, dict):
        raise ModelConfigError(f"{path} holds no JSON object")
    return found


def check_file(model: str) -> None:
    """Raise ModelConfigError if the model is a file or folder here whose config breaks a rule; without torch."""
    if not os.path.exists(os.path.expanduser(model)):
        return
    try:
        config = config_of(model)
    except ModelConfigError:
        # transformers, which reads more kinds of folders, has the last word
        return
    check_config(config)


def _of_hub(model: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:
        # without a connection the exception's type depends on the HTTP library that the hub's client uses
        said = " ".join(str(error).split())[:200]
        raise ModelConfigError(f"the config of {model!r} cannot be had: {said} Pass a config.json") from error


def by_formula(table: EstimateTable) -> None:
    """Print the table.

    Raises:
        typer.BadParameter: The user asked for something that only the whole estimate gives.
        typer.Exit: No row fits.
    """
    options, room, sizes = table.options, table.room, (table.batch_size, table.seq_len)
    asked_for = tuple(options[name] for name in ("device", "engine", "fsdp", "zero", "processes", "target_len", "trl"))
    if table.presets or table.has_page or asked_for != ("cuda", "eager", 1, None, 1, None, False):
        raise typer.BadParameter(
            "--quick goes without --preset, --html, --fsdp, --zero, --processes, --target-len, --trl, --device cpu and "
            "--engine compile"
        )
    config = config_of(table.model)
    asked = _question(config, options)
    rows = [_row(strategy, asked, table) for strategy in asked.strategies]
    dtype = options["dtype"] or config.get("dtype") or config.get("torch_dtype") or "float32"
    line = f"{assumed(options, *sizes, [dtype])}; a formula, within 3% of the answer without --quick"
    if asked.packed_share is not None and asked.packed_share < 1 - MOST_UNPACKED:
        line += f"; only {asked.packed_share:.0%} of the frozen weights are packed"
    fits = room is None or any(row["fits"] for row in rows)
    instead = [] if fits or room is None else list(_remedies(config, *sizes, room, options))
    if table.as_json:
        found = [asdict(remedy) for remedy in instead]
        echo_json({"model": table.model, "gpu_bytes": room, "assumed": line, "rows": rows, "remedies": found})
    else:
        _echo(rows)
        typer.echo("\n".join([f"\nassumed: {line}", *(() if fits else ("none of these fits", *as_lines(instead)))]))
    if not fits:
        raise typer.Exit(Exit.DOES_NOT_FIT)


def _question(config: Mapping[str, Any], options: Mapping[str, Any]) -> Question:
    return question(config, **{name: options[name] for name in ("dtype", "autocast", "lora", "quantization")})


def _remedies(
    config: Mapping[str, Any], batch_size: int, seq_len: int, room: int, options: Mapping[str, Any]
) -> Iterator[Remedy]:
    """Changes that help, by the formula. Those that it does not know are left out."""
    for name, size, changes in changes_of(batch_size, options):
        changed = {**options, **changes}
        try:
            asked = _question(config, changed)
        except ModelConfigError:
            continue
        if STRATEGY in asked.strategies:
            nbytes = asked.answer(STRATEGY, size, seq_len, changed["optimizer"]).device_bytes
            yield Remedy(name, nbytes, nbytes <= room)


def _echo(rows: list[dict[str, Any]]) -> None:
    columns = {"strategy": "strategy", "peak_bytes": "peak", "kept_bytes": "kept", "fits": "fits",
               "largest_batch_size": "largest batch", "longest_sequences": "longest"}  # fmt: skip
    shown = [name for name in columns if name in rows[0]]
    texts = [[columns[name] for name in shown], *([_text(name, row) for name in shown] for row in rows)]
    widths = {column: max(len(line[i]) for line in texts) for i, column in enumerate(texts[0])}
    table = Rows(widths, RIGHT)
    for line in texts:
        table.echo(line)


def _text(name: str, row: dict[str, Any]) -> str:
    value = row[name]
    if name.endswith("_bytes"):
        return f"{value / 2**30:.2f} GiB"
    if name == "fits":
        return "tight" if row["tight"] else "yes" if value else "no"
    return f"{value}+" if name == "largest_batch_size" and value >= MOST else str(value)
