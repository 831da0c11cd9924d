"""`hf-actcompress estimate`: one table of what each strategy needs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
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
from .quick import by_formula
from .remedies import STRATEGY, Remedy, remedies
from .strategies import MOST, TIME_CLASSES, Row, chosen, rows

if TYPE_CHECKING:
    from ..memory.estimate import Estimates
    from ..memory.html import HtmlSection

Preset = Annotated[
    list[str] | None, typer.Option(help="Only stock and this preset; may be repeated. By default those of general use.")
]

_COLUMNS = ("strategy", "peak", "kept", "fits", "largest batch", "longest", "extra time", "gradients")
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
    options |= {"dtype": weights, "lora": lora_of(lora or qlora, lora_rank)}
    options["quantization"] = quantization_of(quantization, qlora)
    if quick:
        by_formula(model, batch_size, seq_len, room, max_context, as_json, options, bool(preset or html))
        return
    with exit_codes(), busy(f"estimating {model}"), frozen_imports():
        table = _table(model, batch_size, seq_len, room, gpu, max_context, preset or [], options)
        if html is not None:
            _write_page(html, table)
    echo_json(_as_data(table)) if as_json else _explain(table)
    if not table.fits:
        raise typer.Exit(Exit.DOES_NOT_FIT)


@dataclass(frozen=True)
class _Table:
    """The rows, and what they are about.

    Args:
        model: Its name.
        found: The rows.
        room, gpu: The card in bytes, and as it was given.
        max_context: Whether the longest sequences were looked for.
        evaluation_bytes: What evaluating such a batch needs.
        assumed: All that the figures depend on.
        fits: Whether one of the rows that were asked for fits.
        instead: What would fit, where none does.
    """

    model: str
    found: list[Row]
    room: int | None
    gpu: str | None
    max_context: bool
    evaluation_bytes: int
    assumed: str
    fits: bool
    instead: list[Remedy]

    @property
    def columns(self) -> tuple[str, ...]:
        left_out: tuple[str, ...] = () if self.max_context else ("longest",)
        left_out += ("fits", "largest batch") if self.room is None else ()
        return tuple(column for column in _COLUMNS if column not in left_out)


def _table(
    model: str,
    batch_size: int,
    seq_len: int,
    room: int | None,
    gpu: str | None,
    max_context: bool,
    presets: list[str],
    options: dict[str, Any],
) -> _Table:
    from ..memory.estimate import Estimates

    several = Estimates(model, **options)
    found = list(rows(several, chosen(presets), room, batch_size, seq_len, max_context))
    fits = room is None or any(row.fits(room) for row in found if not presets or row.strategy.config in presets)
    instead = [] if fits or room is None else list(remedies(model, room, batch_size, seq_len, **options))
    evaluation = several.evaluation_bytes(batch_size, seq_len)
    assumed = _assumed(several, options, f"{batch_size} x {seq_len}")
    return _Table(model, found, room, gpu, max_context, evaluation, assumed, fits, instead)


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
    from ..memory.report import readable_size

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
    from ..memory.report import readable_size
    from ..quick.headroom import ADVICE

    found, room = table.found, table.room
    echo_table(table.columns, [_cells(row, table) for row in found], _RIGHT)
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
        "rows": [data(row) for row in table.found],
        "remedies": [asdict(remedy) for remedy in table.instead],
    }


def _write_page(path: Path, page: _Table) -> None:
    from ..memory.html import HtmlTable, write_html

    first = page.found[0].estimate
    assert first is not None
    title = f"{page.model}: batch {first.batch_size} x {first.seq_len} on {first.device}"
    table = HtmlTable(page.columns, [_cells(row, page) for row in page.found], _RIGHT)
    write_html(path, title, list(_sections(page.found, table)))


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
