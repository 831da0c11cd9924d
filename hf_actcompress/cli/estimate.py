"""`hf-actcompress estimate`: one table of what each strategy needs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import (
    BatchSize,
    Bf16,
    Device,
    Dtype,
    Engine,
    Exit,
    Fp16,
    Gpu,
    Html,
    Json,
    Lora,
    LoraRank,
    MaxContext,
    Model,
    Optimizer,
    Qlora,
    Quantization,
    Quick,
    Rows,
    SeqLen,
    TrustRemoteCode,
    busy,
    card_option,
    echo_json,
    exit_codes,
    frozen_imports,
    lora_of,
    precision,
    progress,
    quantization_of,
    writable,
)
from .quick import by_formula
from .remedies import STRATEGY, Remedy, remedies
from .strategies import DEFAULT, MOST, TIME_CLASSES, Row, chosen, rows

if TYPE_CHECKING:
    from ..memory.estimation.estimates import Estimates

Preset = Annotated[
    list[str] | None, typer.Option(help="Only stock and this preset; may be repeated. By default those of general use.")
]

_COLUMNS = ("strategy", "peak", "kept", "fits", "largest batch", "longest", "extra time", "gradients")
# of what is not known before the first row is printed
_WIDTHS = {
    "strategy": max(len(strategy.name) for strategy in DEFAULT), "peak": 10, "kept": 10, "fits": 5,
    "extra time": max(map(len, TIME_CLASSES)),
}  # fmt: skip
_RIGHT = ("peak", "kept", "largest batch", "longest")


def estimate(
    model: Model,
    batch_size: BatchSize = 1,
    seq_len: SeqLen = 512,
    gpu: Gpu = None,
    max_context: MaxContext = False,
    preset: Preset = None,
    dtype: Dtype = None,
    bf16: Bf16 = False,
    fp16: Fp16 = False,
    optimizer: Optimizer = "adamw",
    lora: Lora = False,
    lora_rank: LoraRank = None,
    quantization: Quantization = None,
    qlora: Qlora = False,
    device: Device = "cuda",
    engine: Engine = "eager",
    trust_remote_code: TrustRemoteCode = False,
    html: Html = None,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """What a training needs, by strategy, without weights or a GPU.

    One row per strategy: its peak (weights, gradients, optimizer states, activations, and an allowance for the CUDA
    context), what is kept for backward, whether it fits on the card, the largest batch that does, what it costs in
    time, and what it does to gradients. Exits with 1 if no row (of --preset, where given) fits on --gpu.
    """
    room, (weights, autocast) = card_option(gpu), precision(dtype, bf16, fp16)
    if max_context and room is None:
        raise typer.BadParameter("the longest sequences are those that fit on a card: pass --gpu too")
    writable("--html", html)
    options: dict[str, Any] = {"optimizer": optimizer, "device": device, "engine": engine, "autocast": autocast}
    options |= {"dtype": weights, "lora": lora_of(lora or qlora, lora_rank), "trust_remote_code": trust_remote_code}
    options["quantization"] = quantization_of(quantization, qlora)
    if quick:
        return by_formula(model, batch_size, seq_len, room, max_context, as_json, options, bool(preset or html))
    columns = _columns(room, max_context)
    printed = None if as_json else Rows({name: _WIDTHS.get(name, 0) for name in columns}, _RIGHT)
    with exit_codes(), frozen_imports():
        found = _Table(model, columns, room, gpu)
        _fill(found, printed, batch_size, seq_len, max_context, preset or [], options)
        _finish(found, as_json, html)
    if not found.fits:
        raise typer.Exit(Exit.DOES_NOT_FIT)


def _finish(found: _Table, as_json: bool, html: Path | None) -> None:
    """What stands below the rows, or all of it as JSON; and the page."""
    echo_json(_as_data(found)) if as_json else _explain(found)
    if html is not None:
        _write_page(html, found)


def _columns(room: int | None, max_context: bool) -> tuple[str, ...]:
    left_out: tuple[str, ...] = () if max_context else ("longest",)
    left_out += ("fits", "largest batch") if room is None else ()
    return tuple(column for column in _COLUMNS if column not in left_out)


@dataclass
class _Table:
    """The rows, and what they are about.

    Args:
        model: Its name.
        columns: Their names.
        room, gpu: The card in bytes, and as it was given.
        rows: As far as they are known.
        evaluation_bytes: What evaluating such a batch needs.
        assumed: All that the figures depend on.
        fits: Whether one of the rows that were asked for fits.
        instead: What would fit, where none does.
    """

    model: str
    columns: tuple[str, ...]
    room: int | None
    gpu: str | None
    rows: list[Row] = field(default_factory=list)
    evaluation_bytes: int = 0
    assumed: str = ""
    fits: bool = True
    instead: list[Remedy] = field(default_factory=list)


def _fill(
    table: _Table,
    printed: Rows | None,
    batch_size: int,
    seq_len: int,
    max_context: bool,
    presets: list[str],
    options: dict[str, Any],
) -> None:
    """Find the rows and all else, and print each row when it is found."""
    strategies, room = chosen(presets), table.room
    names = [strategy.name for strategy in strategies]
    with busy(f"estimating {table.model}: {names[0]}"):
        from ..memory.estimation.estimates import Estimates

        several = Estimates(table.model, **options)
        left = rows(several, strategies, room, batch_size, seq_len, max_context)
        row = next(left, None)
    if printed is not None:
        printed.echo(table.columns)
    while row is not None:
        table.rows.append(row)
        if printed is not None:
            printed.echo(_cells(row, table))
        done = len(table.rows)
        progress(f"{row.strategy.name}: {done} of {len(names)}")
        with busy(f"estimating {table.model}: {', '.join(names[done : done + 1])}"):
            row = next(left, None)
    asked = [row for row in table.rows if not presets or row.strategy.config in presets]
    table.fits = room is None or any(row.fits(room) for row in asked)
    if room is not None and not table.fits:
        with busy(f"looking for what would fit into {table.gpu}"):
            table.instead = list(remedies(several, room, batch_size, seq_len, options))
    table.evaluation_bytes = several.evaluation_bytes(batch_size, seq_len)
    table.assumed = _assumed(several, options, f"{batch_size} x {seq_len}")


def _assumed(several: Estimates, options: dict[str, Any], batch: str) -> str:
    """All that the figures depend on beside the model, in one line."""
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in several.model.parameters()})
    adapters = {True: "LoRA on all linear layers", None: "all weights trained"}
    rank = options["lora"]
    return ", ".join(
        (
            f"batch {batch} without padding",
            f"weights {'/'.join(dtypes)}" + (f" with {options['quantization']}" if options["quantization"] else ""),
            f"autocast {options['autocast']}" if options["autocast"] else "no autocast",
            adapters.get(rank) or f"LoRA of rank {rank} on all linear layers",
            options["optimizer"],
            f"engine {options['engine']}",
            "CUDA's fused attention" if options["device"] == "cuda" else "a CPU's attention",
        )
    )


def _cells(row: Row, table: _Table) -> tuple[str, ...]:
    from ..quick.sizes import readable_size

    strategy, columns = row.strategy, table.columns
    if row.estimate is None:
        return (strategy.name, *["-"] * (len(columns) - 2), f"not for this model: {row.why_not}")
    texts = {
        "strategy": strategy.name,
        "peak": readable_size(row.estimate.device_bytes),
        "kept": readable_size(row.estimate.kept_bytes),
        "fits": _fits(row, table.room),
        "largest batch": _at_least(row.largest),
        "longest": "-" if row.longest is None else str(row.longest),
        "extra time": strategy.time,
        "gradients": strategy.gradients,
    }
    return tuple(texts[column] for column in columns)


def _fits(row: Row, room: int | None) -> str:
    if room is None or not row.fits(room):
        return "no"
    return "tight" if row.tight(room) else "yes"


def _at_least(largest: int | None) -> str:
    return "-" if largest is None else f"{largest}+" if largest >= MOST else str(largest)


def _explain(table: _Table) -> None:
    from ..quick.headroom import ADVICE
    from ..quick.sizes import readable_size

    found, room = table.rows, table.room
    used = {row.strategy.time for row in found}
    typer.echo(f"\nassumed: {table.assumed}")
    for name, text in TIME_CLASSES.items():
        if name in used and name != "none":
            typer.echo(f"extra time, {name}: {text}")
    if any(row.strategy.gradients != "exact" for row in found):
        typer.echo("lossy gradients: fidelity_report(model, batch) measures how far they are off")
    for note in dict.fromkeys(note for row in found if row.estimate is not None for note in row.estimate.notes):
        typer.echo(note)
    typer.echo(f"evaluating such a batch, its logits whole: {readable_size(table.evaluation_bytes)}")
    if room is None:
        return
    if any(row.tight(room) for row in found):
        typer.echo(ADVICE)
    fitting = [row.strategy.name for row in found if row.fits(room)]
    typer.echo(f"fits into {table.gpu}: {', '.join(fitting) if fitting else 'none of these'}")
    for remedy in table.instead:
        fits = "would fit" if remedy.fits else "would not"
        typer.echo(f"  {remedy.name}, {STRATEGY}: {readable_size(remedy.nbytes)}, {fits}")


def _as_data(table: _Table) -> dict[str, Any]:
    room = table.room

    def data(row: Row) -> dict[str, Any]:
        strategy = row.strategy
        return {
            "strategy": strategy.name,
            "preset": strategy.config,
            "gradient_checkpointing": strategy.checkpointing,
            "checkpoint_input": strategy.checkpoint_input,
            "peak_bytes": row.estimate.device_bytes if row.estimate is not None else None,
            "fits": row.fits(room) if room is not None else None,
            "tight": row.tight(room) if room is not None else None,
            "largest_batch_size": row.largest,
            "longest_sequences": row.longest,
            "extra_time": strategy.time,
            "gradients": strategy.gradients,
            "why_not": row.why_not or None,
            "estimate": json.loads(row.estimate.to_json()) if row.estimate is not None else None,
        }

    return {
        "model": table.model,
        "gpu_bytes": room,
        "assumed": table.assumed,
        "evaluation_bytes": table.evaluation_bytes,
        "rows": [data(row) for row in table.rows],
        "remedies": [asdict(remedy) for remedy in table.instead],
    }


def _write_page(path: Path, table: _Table) -> None:
    from ..display.tables import Table
    from .html_pages import write_estimates

    cells = Table(table.columns, [_cells(row, table) for row in table.rows], _RIGHT)
    write_estimates(path, table.model, table.rows, cells, table.room, table.gpu)
