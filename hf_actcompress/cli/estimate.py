"""`hf-actcompress estimate`: one table of what each strategy needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from . import flags
from . import latents as of_diffusers
from .assumptions import assumed
from .cache import Answer, place_of, read, write
from .common import Exit, busy, progress, writable, wrote
from .estimate_table import EstimateTable, as_data, rows
from .estimate_text import explanation, text_of, text_row, text_table
from .flags import card_option, check_presets, lora_of, precision, quantization_of
from .latents import latents_in, rows_for
from .lengths import Lengths, lengths_in, steps_of
from .process import for_estimates
from .quick import by_formula, check_file
from .remedies import remedies

Preset = Annotated[
    list[str] | None,
    typer.Option(help="Show only stock and this preset; repeatable. By default: the most useful strategies."),
]


def estimate(
    context: typer.Context,
    model: flags.Model,
    batch_size: flags.BatchSize = 1,
    seq_len: flags.SeqLen = 512,
    lengths: Lengths = None,
    height: of_diffusers.Height = None,
    width: of_diffusers.Width = None,
    frames: of_diffusers.Frames = None,
    text_tokens: of_diffusers.TextTokens = None,
    gpu: flags.Gpu = None,
    max_context: flags.MaxContext = False,
    preset: Preset = None,
    dtype: flags.Dtype = None,
    bf16: flags.Bf16 = False,
    fp16: flags.Fp16 = False,
    optimizer: flags.Optimizer = "adamw",
    lora: flags.Lora = False,
    lora_rank: flags.LoraRank = None,
    quantization: flags.Quantization = None,
    qlora: flags.Qlora = False,
    device: flags.Device = "cuda",
    engine: flags.Engine = "eager",
    fsdp: flags.Fsdp = 1,
    zero: flags.Zero = None,
    processes: flags.Processes = 1,
    trl: flags.Trl = False,
    target_len: flags.TargetLen = None,
    trust_remote_code: flags.TrustRemoteCode = False,
    html: flags.Html = None,
    quick: flags.Quick = False,
    no_cache: flags.NoCache = False,
    as_json: flags.Json = False,
) -> None:
    """Estimate what training needs, by strategy; no weights, no GPU.

    One row per strategy: its peak (weights, gradients, optimizer states, activations, and an allowance for the CUDA
    context), what is kept for backward, whether it fits on the card, the largest batch that fits, the extra time, and
    the effect on gradients. Exits with code 1 if no row (of --preset, if given) fits on --gpu.
    """
    _card(gpu, max_context)
    html = writable("--html", html)
    # what is not named here is in the context's parameters
    _answered(_table(context, lengths_in(lengths), has_page=html is not None), html, quick, no_cache)


def _table(context: typer.Context, samples: list[int], *, has_page: bool) -> EstimateTable:
    """The question, as a table without rows. `samples` are the lengths of a data set."""
    given = context.params
    model, batch_size, gpu, preset = (given[name] for name in ("model", "batch_size", "gpu", "preset"))
    check_presets(*(preset or ()))
    options = _options(given)
    latents = latents_in(context, model, options)
    seq_len = max(samples, default=given["seq_len"]) if latents is None else latents.tokens
    asked = model, batch_size, seq_len, options, _card(gpu, False), gpu, given["max_context"], list(preset or ())
    return EstimateTable(*asked, steps_of(samples, batch_size), given["as_json"], has_page, latents)


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `Estimates`, from those of the command."""
    weights, autocast = precision(given["dtype"], given["bf16"], given["fp16"])
    options: dict[str, Any] = {"dtype": weights, "autocast": autocast}
    options["lora"] = lora_of(given["lora"] or given["qlora"], given["lora_rank"])
    options["quantization"] = quantization_of(given["quantization"], given["qlora"])
    options |= _processes(given["fsdp"], given["zero"], given["processes"])
    as_they_are = ("optimizer", "device", "engine", "target_len", "trl", "trust_remote_code", *of_diffusers.SIZES)
    return options | {name: given[name] for name in as_they_are}


def _card(gpu: str | None, max_context: bool) -> int | None:
    """The bytes of the card, which the search for the longest sequences needs."""
    room = card_option(gpu)
    if max_context and room is None:
        raise typer.BadParameter("--max-context finds the longest sequences that fit on a card: pass --gpu, too")
    return room


def _processes(fsdp: int, zero: int | None, processes: int) -> dict[str, Any]:
    """The options of `Estimates` about several processes, which need or exclude each other."""
    if (zero is not None and processes == 1) or (fsdp > 1 and processes > 1):
        raise typer.BadParameter("--zero needs --processes (2 or more), and neither can be combined with --fsdp")
    return {"fsdp": fsdp, "zero": zero, "processes": processes}


def _answered(table: EstimateTable, html: Path | None, quick: bool, no_cache: bool) -> None:
    """Print the stored answer, or compute it; write the page; end the program if nothing fits."""
    if quick:
        return by_formula(table)
    check_file(table.model)
    sizes = table.batch_size, table.seq_len, table.max_context
    asked = {**table.options, "gpu": table.gpu, "sizes": sizes, "steps": table.steps, "presets": table.presets}
    place = None if no_cache else place_of(table.model, {**asked, "json": table.as_json, "html": table.has_page})
    answer = None if place is None else read(place)
    if answer is not None:
        typer.echo(answer.text)
    else:
        answer = _computed(table)
        if place is not None:
            write(place, answer)
    if html is not None and answer.page is not None:
        html.write_text(answer.page, encoding="utf-8")
        wrote(html)
    if not answer.fits:
        raise typer.Exit(Exit.DOES_NOT_FIT)


def _computed(table: EstimateTable) -> Answer:
    """Compute the answer, and print it row by row."""
    with ExitStack() as stack:
        with busy(f"estimating {table.model}"):
            stack.enter_context(for_estimates())
        _fill(table)
        text = json.dumps(as_data(table), indent=2) if table.as_json else text_of(table)
        typer.echo(text if table.as_json else explanation(table))
        if not table.has_page:
            return Answer(text, table.fits, None)
        from .html_pages import estimates_page

        return Answer(text, table.fits, estimates_page(table))


def _fill(table: EstimateTable) -> None:
    """Compute the rows and everything below them, and print each row as soon as it is known."""
    strategies, room = rows_for(table.presets, table.latents), table.room
    sizes = table.batch_size, table.seq_len
    names = [strategy.name for strategy in strategies]
    with busy(f"estimating {table.model}: {names[0]}"):
        from ..memory.estimation.estimates import Estimates
        from ..memory.estimation.quantized.model import packed_as

        several = Estimates(table.model, **table.options)
        left = rows(several, strategies, table)
        row = next(left, None)
    while row is not None:
        table.rows.append(row)
        if not table.as_json:
            lines = text_table(table)
            typer.echo((f"{lines.heading()}\n" if len(table.rows) == 1 else "") + lines.line(text_row(row, table)))
        done = len(table.rows)
        progress(f"{row.strategy.name}: {done} of {len(names)}")
        with busy(f"estimating {table.model}: {', '.join(names[done : done + 1])}"):
            row = next(left, None)
    asked = [row for row in table.rows if not table.presets or row.strategy.name in table.presets]
    table.fits = room is None or any(row.fits(room) for row in asked)
    if room is not None and not table.fits:
        with busy(f"looking for what would fit into {table.gpu}"):
            table.instead = list(remedies(several, room, *sizes, table.options, names))
    table.evaluation_bytes = several.evaluation_bytes(*sizes)
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in several.model.parameters()})
    packed = table.options["quantization"] or packed_as(several.model)
    table.assumed = assumed({**table.options, "quantization": packed}, *sizes, dtypes, table.latents)
