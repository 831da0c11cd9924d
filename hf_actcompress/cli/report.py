"""`hf-actcompress report`: what a model keeps for backward now, module by module, measured."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..garbage import frozen_imports
from . import flags
from .assumptions import assumed
from .common import busy, progress, show, writable, wrote
from .flags import check_presets, lora_of, precision
from .quick import check_file

if TYPE_CHECKING:
    from ..memory.measurement.report import MemoryReport
    from ..memory.measurement.timeline import MemoryTimeline

Preset = Annotated[str, typer.Option(help="The preset to compare with stock.")]
Layers = Annotated[
    int | None, typer.Option(min=1, help="Measure a model with only this many layers; for large models.")
]
Checkpointing = Annotated[bool, typer.Option("--gradient-checkpointing", help="Turn gradient checkpointing on.")]


def report(
    model: flags.Model,
    batch_size: flags.BatchSize = 2,
    seq_len: flags.SeqLen = 128,
    preset: Preset = "exact",
    dtype: flags.Dtype = None,
    lora: flags.Lora = False,
    lora_rank: flags.LoraRank = None,
    gradient_checkpointing: Checkpointing = False,
    layers: Layers = None,
    html: flags.Html = None,
    as_json: flags.Json = False,
) -> None:
    """Measure what a model keeps for backward, stock and patched.

    Measured on the CPU, per module and role. The model is built from its config with random weights, which do not
    change what is kept, and runs on random tokens. The weights must fit in memory: --layers makes a model smaller.
    """
    html = writable("--html", html)
    check_presets(preset)
    precision(dtype, False, False)
    progress(f"measuring {model}")
    check_file(model)
    with busy(f"measuring {model}"):
        from ..memory.estimation.random_model import local_model, random_batch
        from ..memory.measurement.memory_report import memory_report

        built = local_model(
            model,
            dtype,
            lora=lora_of(lora, lora_rank),
            gradient_checkpointing=gradient_checkpointing,
            layers=layers,
            most_bytes=host_bytes(),
        )
        batch = random_batch(built, batch_size, seq_len)
        with frozen_imports():
            found = memory_report(built, batch, preset)
            timelines = _timelines(built, batch, preset) if html is not None else {}
        if html is not None:
            _write_page(html, f"{model}: batch {batch_size} x {seq_len}", found, timelines)
    options = {"lora": lora_of(lora, lora_rank), "device": "cpu"}
    weights = sorted({str(p.dtype).removeprefix("torch.") for p in built.parameters()})
    show(found, as_json, assumed(options, batch_size, seq_len, weights))


def host_bytes() -> int | None:
    """Bytes of the machine's memory; None if it does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _timelines(model: Any, batch: dict[str, Any], preset: str) -> dict[str, MemoryTimeline]:
    from ..memory.measurement.timeline import memory_timeline
    from ..patching import patched

    def step() -> None:
        model(**batch).loss.backward()

    model.train()
    # one step first, so that the gradients exist
    step()
    stock = memory_timeline(step, "cpu")
    with patched(model, preset, strict=False):
        step()
        return {"stock": stock, preset: memory_timeline(step, "cpu")}


def _write_page(path: Path, title: str, found: MemoryReport, timelines: dict[str, MemoryTimeline]) -> None:
    from ..display.html import HtmlBars, HtmlSection, write_html
    from ..display.tables import Table
    from ..quick.sizes import readable_size

    names = list(timelines)
    bars = {name: {role: sizes[i] for role, sizes in found.by_role().items()} for i, name in enumerate(names)}
    cells = [
        (row.module or "(model)", row.role, readable_size(row.stock_bytes), readable_size(row.patched_bytes))
        for row in found.rows
    ]
    table = Table(("module", "role", *names), cells, names)
    sections = [
        HtmlSection("Kept for backward", str(found), bars=[HtmlBars(bars)]),
        HtmlSection(
            "One step: memory over time",
            "\n".join(f"{name}: {timeline}" for name, timeline in timelines.items()),
            curves=timelines,
        ),
        HtmlSection("By module", tables=[table]),
    ]
    write_html(path, title, sections)
    wrote(path)
