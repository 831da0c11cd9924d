"""`hf-actcompress estimate --quick`: the same table by the formula, without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import typer

from ..errors import ModelConfigError
from ..quick.config_rules import check_config
from ..quick.diffusion import config_path
from ..quick.formula import QuickEstimate, largest, longest, tiles_from
from ..quick.headroom import HEADROOM, usable
from ..quick.hub import check_connection, config_of_hub, local_path
from ..quick.question import MOST_UNPACKED, Question, question
from ..quick.strategies import STRATEGIES, recommended
from .assumptions import assumed
from .common import Exit, echo_json, wrapped
from .estimate_table import EstimateTable
from .estimate_text import TextTable, at_least, meanings, recommendation
from .remedies import STRATEGY, Remedy, as_lines, changes_of
from .strategies import MOST


def _row(strategy: str, asked: Question, table: EstimateTable) -> dict[str, Any]:
    """The row of a strategy, with the keys of `estimate --json`."""

    def answer(batch_size: int, seq_len: int) -> QuickEstimate:
        return asked.answer(strategy, batch_size, seq_len, table.options["optimizer"])

    found, room, known = answer(table.batch_size, table.seq_len), table.room, STRATEGIES[strategy]
    row: dict[str, Any] = {
        "strategy": strategy,
        "preset": known.config,
        "gradient_checkpointing": known.checkpointing,
        "checkpoint_input": known.checkpoint_input,
        "peak_bytes": found.device_bytes,
        "kept_bytes": found.kept_bytes,
        **dict.fromkeys(("fits", "tight", "largest_batch_size", "longest_sequences")),
        "extra_time": known.time,
        "gradients": known.gradients,
        "why_not": None,
        "estimate": _estimate(found, known.config, table),
    }
    if room is not None:
        fits = found.device_bytes <= room
        row |= {"fits": fits, "tight": fits and found.device_bytes > usable(room, HEADROOM)}
        row["largest_batch_size"] = largest(
            lambda b: answer(b, table.seq_len).device_bytes, room, MOST, tiles_from(table.seq_len)
        )
        if table.max_context:
            most = asked.most_tokens
            size = table.batch_size
            row["longest_sequences"] = longest(lambda s: answer(size, s).device_bytes, room, most, size)
    return row


# what the whole estimate knows of a row, and the formula does not
_UNKNOWN = ("model", "kept_per_layer", "layers", "reserved_share", "reserved_share_expandable")


def _estimate(found: QuickEstimate, config: str | None, table: EstimateTable) -> dict[str, Any]:
    """The parts of a row's peak, with the keys of an `Estimate`; None for what the formula does not know."""
    return {
        "state_bytes": found.state_bytes,
        "transient_bytes": found.step_peak_bytes - found.kept_bytes,
        "total_peak_bytes": found.device_bytes - found.context_bytes,
        "device_bytes": found.device_bytes,
        **dict.fromkeys(_UNKNOWN),
        "device": "cuda",
        "batch_size": table.batch_size,
        "seq_len": table.seq_len,
        "config": config or "stock",
        "engine": "eager",
        "kept_bytes": found.kept_bytes,
        "notes": [],
        **asdict(found),
    }


def config_of(model: str) -> dict[str, Any]:
    """The config.json of a folder, a file, or a model of the hub.

    Raises:
        ModelConfigError: There is no such config, or it is not a JSON object.
    """
    path = local_path(model) or config_of_hub(model)
    path = config_path(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelConfigError(f"cannot read a config from {path}: {error}") from error
    if not isinstance(found, dict):
        raise ModelConfigError(f"{path} does not contain a JSON object")
    return found


def check_file(model: str) -> None:
    """Raise ModelConfigError, without torch, if the model is a file or folder that is not there, holds an adapter alone
    or a config that breaks a rule, or if it is on the hub, which does not answer.
    """
    if local_path(model) is None:
        check_connection(model)
        return
    try:
        config = config_of(model)
    except ModelConfigError:
        # transformers, which reads more kinds of folders, has the last word
        return
    check_config(config)


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
            "--quick cannot be combined with --preset, --html, --fsdp, --zero, --processes, --target-len, --trl, "
            "--device cpu or --engine compile"
        )
    config = config_of(table.model)
    asked = _question(config, options)
    rows = [_row(strategy, asked, table) for strategy in asked.strategies]
    dtype = options["dtype"] or config.get("dtype") or config.get("torch_dtype") or "float32"
    line = f"{assumed(options, *sizes, [dtype])}; computed by a formula, within 3% of the answer without --quick"
    if asked.packed_share is not None and asked.packed_share < 1 - MOST_UNPACKED:
        line += f"; only {asked.packed_share:.0%} of the frozen weights are packed"
    fits = room is None or any(row["fits"] for row in rows)
    instead = [] if fits or room is None else list(_remedies(config, *sizes, room, options))
    known = [(row["strategy"], STRATEGIES[row["strategy"]], _verdict(row)) for row in rows]
    start = recommended(row for row in known if room is not None or row[1].config is not None)
    if table.as_json:
        about = {"model": table.model, "gpu_bytes": room, "assumed": line, "evaluation_bytes": None}
        remedies = [asdict(remedy) for remedy in instead]
        echo_json({**about, "rows": rows, "recommended": start, "remedies": remedies})
    else:
        _echo(rows, table)
        prose = [f"assumed: {line}", *meanings([row[1] for row in known]), *(() if fits else ("none of these fits",))]
        advised = () if start is None else recommendation(start, STRATEGIES[start])
        typer.echo("\n".join(["", *map(wrapped, prose), *as_lines(instead), *advised]))
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


def _echo(rows: list[dict[str, Any]], table: EstimateTable) -> None:
    text = TextTable(table.columns, rows[0]["peak_bytes"])
    typer.echo(text.heading())
    for row in rows:
        texts = {"strategy": row["strategy"], "peak": str(row["peak_bytes"]), "kept": str(row["kept_bytes"])}
        texts |= {"fits": _verdict(row), "largest batch": at_least(row["largest_batch_size"])}
        texts |= {"longest": str(row["longest_sequences"]), "extra time": row["extra_time"]}
        typer.echo(text.line({**texts, "gradients": row["gradients"]}))


def _verdict(row: dict[str, Any]) -> str:
    return "tight" if row["tight"] else "no" if row["fits"] is False else "yes"
