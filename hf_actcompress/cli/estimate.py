"""`hf-actcompress estimate`: one table of what each strategy needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .assumptions import assumed
from .cache import Answer, place_of, read, write
from .common import (
    BatchSize,
    Bf16,
    Device,
    Dtype,
    Engine,
    Exit,
    Fp16,
    Fsdp,
    Gpu,
    Html,
    Json,
    Lora,
    LoraRank,
    MaxContext,
    Model,
    NoCache,
    Optimizer,
    Processes,
    Qlora,
    Quantization,
    Quick,
    SeqLen,
    TargetLen,
    Trl,
    TrustRemoteCode,
    Zero,
    busy,
    card_option,
    lora_of,
    precision,
    progress,
    quantization_of,
    writable,
)
from .estimate_table import EstimateTable, as_data, cells_of, columns_of, explanation, layout, page_of, text_of
from .lengths import Lengths, lengths_in, steps_of
from .process import for_estimates
from .quick import by_formula, check_file
from .remedies import remedies
from .strategies import chosen, rows

Preset = Annotated[
    list[str] | None, typer.Option(help="Only stock and this preset; may be repeated. By default those of general use.")
]


def estimate(
    model: Model,
    batch_size: BatchSize = 1,
    seq_len: SeqLen = 512,
    lengths: Lengths = None,
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
    fsdp: Fsdp = 1,
    zero: Zero = None,
    processes: Processes = 1,
    trl: Trl = False,
    target_len: TargetLen = None,
    trust_remote_code: TrustRemoteCode = False,
    html: Html = None,
    quick: Quick = False,
    no_cache: NoCache = False,
    as_json: Json = False,
) -> None:
    """What a training needs, by strategy, without weights or a GPU.

    One row per strategy: its peak (weights, gradients, optimizer states, activations, and an allowance for the CUDA
    context), what is kept for backward, whether it fits on the card, the largest batch that does, what it costs in
    time, and what it does to gradients. Exits with 1 if no row (of --preset, where given) fits on --gpu.
    """
    room, html, samples = _card(gpu, max_context), writable("--html", html), lengths_in(lengths)
    seq_len = max(samples, default=seq_len)
    options = _weights(precision(dtype, bf16, fp16), quantization_of(quantization, qlora))
    options |= _processes(fsdp, zero, processes) | {"lora": lora_of(lora or qlora, lora_rank), "target_len": target_len}
    options |= {"optimizer": optimizer, "device": device, "engine": engine, "trust_remote_code": trust_remote_code}
    options["trl"] = trl
    if quick:
        return by_formula(model, batch_size, seq_len, room, max_context, as_json, options, bool(preset or html))
    table = EstimateTable(model, columns_of(room, max_context), room, gpu, steps_of(samples, batch_size))
    _answered(table, (batch_size, seq_len, max_context), preset or [], options, as_json, no_cache, html)


def _card(gpu: str | None, max_context: bool) -> int | None:
    """The bytes of the card, which the search for the longest sequences needs."""
    room = card_option(gpu)
    if max_context and room is None:
        raise typer.BadParameter("the longest sequences are those that fit on a card: pass --gpu too")
    return room


def _weights(precision: tuple[str | None, str | None], quantization: str | None) -> dict[str, Any]:
    """The options of `Estimates` about weights."""
    return {"dtype": precision[0], "autocast": precision[1], "quantization": quantization}


def _processes(fsdp: int, zero: int | None, processes: int) -> dict[str, Any]:
    """The options of `Estimates` about several processes, which need or exclude each other."""
    if (zero is not None and processes == 1) or (fsdp > 1 and processes > 1):
        raise typer.BadParameter("--zero goes with --processes (2 or more), and neither with --fsdp")
    return {"fsdp": fsdp, "zero": zero, "processes": processes}


def _answered(
    table: EstimateTable,
    sizes: tuple[int, int, bool],
    presets: list[str],
    options: dict[str, Any],
    as_json: bool,
    no_cache: bool,
    html: Path | None,
) -> None:
    """Print the stored answer, or compute it; write the page; end the program if nothing fits."""
    check_file(table.model)
    asked = {**options, "gpu": table.gpu, "sizes": sizes, "steps": table.steps, "presets": presets or None}
    asked |= {"json": as_json, "html": html is not None}
    place = None if no_cache else place_of(table.model, asked)
    answer = None if place is None else read(place)
    if answer is not None:
        typer.echo(answer.text)
    else:
        answer = _computed(table, *sizes, presets, options, as_json, html is not None)
        if place is not None:
            write(place, answer)
    if html is not None and answer.page is not None:
        html.write_text(answer.page, encoding="utf-8")
    if not answer.fits:
        raise typer.Exit(Exit.DOES_NOT_FIT)


def _computed(
    table: EstimateTable,
    batch_size: int,
    seq_len: int,
    max_context: bool,
    presets: list[str],
    options: dict[str, Any],
    as_json: bool,
    html: bool,
) -> Answer:
    """Compute the answer, and print it row by row."""
    with busy(f"estimating {table.model}"):
        # before `for_estimates`, or each collection goes through all of torch
        from ..memory.estimation import estimates  # noqa: F401
    with for_estimates():
        _fill(table, not as_json, as_json or html, batch_size, seq_len, max_context, presets, options)
        text = json.dumps(as_data(table), indent=2) if as_json else text_of(table)
        typer.echo(text if as_json else "\n".join(explanation(table)))
        return Answer(text, table.fits, page_of(table) if html else None)


def _fill(
    table: EstimateTable,
    printed: bool,
    by_role: bool,
    batch_size: int,
    seq_len: int,
    max_context: bool,
    presets: list[str],
    options: dict[str, Any],
) -> None:
    """Compute the rows and everything below them, and print each row as soon as it is known."""
    strategies, room = chosen(presets), table.room
    names = [strategy.name for strategy in strategies]
    with busy(f"estimating {table.model}: {names[0]}"):
        from ..memory.estimation.estimates import Estimates
        from ..memory.estimation.quantized.model import packed_as

        several = Estimates(table.model, **options)
        left = rows(several, strategies, room, batch_size, seq_len, max_context, table.steps, not printed, by_role)
        row = next(left, None)
    lines = layout(table.columns)
    if printed:
        lines.echo(table.columns)
    while row is not None:
        table.rows.append(row)
        if printed:
            lines.echo(cells_of(row, table))
        done = len(table.rows)
        progress(f"{row.strategy.name}: {done} of {len(names)}")
        with busy(f"estimating {table.model}: {', '.join(names[done : done + 1])}"):
            row = next(left, None)
    asked = [row for row in table.rows if not presets or row.strategy.name in presets]
    table.fits = room is None or any(row.fits(room) for row in asked)
    if room is not None and not table.fits:
        with busy(f"looking for what would fit into {table.gpu}"):
            table.instead = list(remedies(several, room, batch_size, seq_len, options, names))
    table.evaluation_bytes = several.evaluation_bytes(batch_size, seq_len)
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in several.model.parameters()})
    packed = options["quantization"] or packed_as(several.model)
    table.assumed = assumed({**options, "quantization": packed}, batch_size, seq_len, dtypes)
