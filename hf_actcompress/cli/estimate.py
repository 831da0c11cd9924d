"""`hf-actcompress estimate`: one table of what each strategy needs."""

from __future__ import annotations

import json
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
    Model,
    Optimizer,
    Qlora,
    Quantization,
    SeqLen,
    busy,
    card_option,
    echo_json,
    echo_table,
    exit_codes,
    frozen_imports,
    lora_of,
    precision,
    quantization_of,
    writable,
)
from .strategies import MOST, TIME_CLASSES, Row, chosen, rows

if TYPE_CHECKING:
    from ..memory.html import HtmlSection

Preset = Annotated[
    list[str] | None, typer.Option(help="Only stock and this preset; may be repeated. By default those of general use.")
]

_COLUMNS = ("strategy", "peak", "kept", "fits", "largest batch", "extra time", "gradients")
_RIGHT = ("peak", "kept", "largest batch")


def estimate(
    model: Model,
    batch_size: BatchSize = 1,
    seq_len: SeqLen = 512,
    gpu: Gpu = None,
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
    html: Html = None,
    as_json: Json = False,
) -> None:
    """What a training needs, by strategy, without weights or a GPU.

    One row per strategy: its peak (weights, gradients, optimizer states, activations, and an allowance for the CUDA
    context), what is kept for backward, whether it fits on the card, the largest batch that does, what it costs in
    time, and what it does to gradients. Exits with 1 if no row (of --preset, where given) fits on --gpu.
    """
    room, (weights, autocast) = card_option(gpu), precision(dtype, bf16, fp16)
    writable("--html", html)
    options = {"batch_size": batch_size, "seq_len": seq_len, "optimizer": optimizer, "device": device}
    options |= {"engine": engine, "autocast": autocast}
    with exit_codes(), busy(f"estimating {model}"):
        from ..memory.estimating.source import dtype_of, skeleton

        adapters, frozen = lora_of(lora or qlora, lora_rank), quantization_of(quantization, qlora)
        modules = skeleton(model, dtype_of(weights), adapters, False, frozen)
        with frozen_imports():
            found = list(rows(modules, chosen(preset or []), room, **options))
        if html is not None:
            _write_page(html, model, found, room)
    if as_json:
        echo_json(_as_data(model, found, room))
    else:
        echo_table(_columns(room), [_cells(row, room) for row in found], _RIGHT)
        _explain(found, room, gpu)
    if room is not None and not any(row.fits(room) for row in found if not preset or row.strategy.config in preset):
        raise typer.Exit(Exit.DOES_NOT_FIT)


def _columns(room: int | None) -> tuple[str, ...]:
    return _COLUMNS if room is not None else tuple(c for c in _COLUMNS if c not in ("fits", "largest batch"))


def _cells(row: Row, room: int | None) -> tuple[str, ...]:
    from ..memory.report import readable_size

    name, time, gradients = row.strategy.name, row.strategy.time, row.strategy.gradients
    if row.estimate is None:
        return (name, *["-"] * (len(_columns(room)) - 2), f"not for this model: {row.why_not}")
    sizes = (readable_size(row.estimate.device_bytes), readable_size(row.estimate.kept_bytes))
    if room is None:
        return (name, *sizes, time, gradients)
    return (
        name,
        *sizes,
        "yes" if row.fits(room) else "no",
        _at_least(row.largest),
        time,
        gradients,
    )


def _at_least(largest: int | None) -> str:
    return "-" if largest is None else f"{largest}+" if largest >= MOST else str(largest)


def _explain(found: list[Row], room: int | None, gpu: str | None) -> None:
    used = {row.strategy.time for row in found}
    typer.echo("")
    for name, text in TIME_CLASSES.items():
        if name in used and name != "none":
            typer.echo(f"extra time, {name}: {text}")
    if any(row.strategy.gradients != "exact" for row in found):
        typer.echo("lossy gradients: fidelity_report(model, batch) measures how far they are off")
    for note in dict.fromkeys(note for row in found if row.estimate is not None for note in row.estimate.notes):
        typer.echo(note)
    fitting = [row.strategy.name for row in found if room is not None and row.fits(room)]
    if room is not None:
        typer.echo(f"fits into {gpu}: {', '.join(fitting) if fitting else 'none of these'}")


def _as_data(model: str, found: list[Row], room: int | None) -> dict[str, Any]:
    def data(row: Row) -> dict[str, Any]:
        strategy = row.strategy
        return {
            "strategy": strategy.name,
            "preset": strategy.config,
            "gradient_checkpointing": strategy.checkpointing,
            "checkpoint_input": strategy.checkpoint_input,
            "peak_bytes": row.estimate.device_bytes if row.estimate is not None else None,
            "fits": row.fits(room) if room is not None else None,
            "largest_batch_size": row.largest,
            "extra_time": strategy.time,
            "gradients": strategy.gradients,
            "why_not": row.why_not or None,
            "estimate": json.loads(row.estimate.to_json()) if row.estimate is not None else None,
        }

    return {"model": model, "gpu_bytes": room, "rows": [data(row) for row in found]}


def _write_page(path: Path, model: str, found: list[Row], room: int | None) -> None:
    from ..memory.html import HtmlTable, write_html

    first = found[0].estimate
    assert first is not None
    title = f"{model}: batch {first.batch_size} x {first.seq_len} on {first.device}"
    table = HtmlTable(_columns(room), [_cells(row, room) for row in found], _RIGHT)
    write_html(path, title, list(_sections(found, table)))


def _sections(found: list[Row], table: Any) -> list[HtmlSection]:
    from ..memory.html import HtmlSection, HtmlTable
    from ..memory.pictures import PeakLine, draw_batch_sizes, draw_roles
    from ..memory.report import readable_size

    known = [(row.strategy.name, row, row.estimate) for row in found if row.estimate is not None]
    bars = {name: estimate.kept_by_role for name, _, estimate in known}
    # with no batch at all there are weights, gradients and optimizer states
    peaks = {name: {0: e.device_bytes - e.step_peak_bytes, **row.peaks} for name, row, e in known}
    lines = {name: PeakLine(*zip(*sorted(points.items()), strict=True)) for name, points in peaks.items()}
    parts = [(name, part, readable_size(size)) for name, _, estimate in known for part, size in estimate.rows()]
    return [
        HtmlSection("Strategies", tables=[table]),
        HtmlSection("Kept for backward, by role", pictures=[("by role", lambda to: draw_roles(bars, to))]),
        HtmlSection("Peak by batch size", pictures=[("by batch size", lambda to: draw_batch_sizes(lines, to))]),
        HtmlSection("Parts of the peak", tables=[HtmlTable(("strategy", "part", "bytes"), parts, ("bytes",))]),
    ]
