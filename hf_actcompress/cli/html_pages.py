"""The pages that --html of `estimate` and `plan` writes: tables and bars, without matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from ..display.html import HtmlBars, HtmlSection, html_page, write_html
from ..display.tables import Table
from ..quick.sizes import readable_size
from .estimate_table import EstimateTable
from .estimate_text import RIGHT, cells_of

if TYPE_CHECKING:
    from ..memory.planning.plans import Plan


def estimates_page(found: EstimateTable) -> str:
    """The page of a table of strategies. The card is a line across the bars of the peaks."""
    cells = Table(found.columns, [cells_of(row, found) for row in found.rows], RIGHT)
    known = [(row.strategy.name, row, row.estimate) for row in found.rows if row.estimate is not None]
    first = known[0][2]
    peaks = {name: dict(estimate.rows()) for name, _, estimate in known}
    parts = [
        (name, part, readable_size(size))
        for name, sizes in peaks.items()
        for part, size in sorted(sizes.items(), key=lambda item: -item[1])
    ]
    sizes = [
        (name, str(batch), readable_size(peak)) for name, row, _ in known for batch, peak in sorted(row.peaks.items())
    ]
    kept = {name: estimate.kept_by_role for name, _, estimate in known}
    sections = [
        HtmlSection("Strategies", tables=[cells]),
        HtmlSection("Peak, by part", bars=[HtmlBars(peaks, found.room, found.gpu or "")]),
        HtmlSection("Kept for backward, by role", bars=[HtmlBars(kept)]),
        HtmlSection(
            "Peak by batch size",
            tables=[Table(("strategy", "batch size", "peak"), sizes, ("batch size", "peak"))],
        ),
        HtmlSection("Parts of the peak", tables=[Table(("strategy", "part", "bytes"), parts, ("bytes",))]),
    ]
    return html_page(f"{found.model}: batch {first.batch_size} x {first.seq_len} on {first.device}", sections)


def write_plan(path: Path, title: str, found: Plan) -> None:
    """Write the page of a plan. The budget is a line across the bar of the peak."""
    cells = [(row.layer, row.option, readable_size(row.kept_bytes)) for row in found.rows]
    peak = dict(found.estimate.rows())
    parts = [(name, readable_size(size)) for name, size in sorted(peak.items(), key=lambda item: -item[1])]
    layers = {}
    for (option, kept), rows in groupby(found.rows, lambda row: (row.option, row.kept_bytes)):
        layers[_several([row.layer for row in rows])] = {option: kept}
    sections = [
        HtmlSection("Plan", str(found), bars=[HtmlBars({"peak": peak}, found.budget_bytes, "the budget")]),
        HtmlSection(
            "Layers",
            "What each of them keeps.",
            bars=[HtmlBars(layers)],
            tables=[Table(("layer", "option", "keeps"), cells, ("keeps",))],
        ),
        HtmlSection("Parts of the peak", tables=[Table(("part", "bytes"), parts, ("bytes",))]),
    ]
    write_html(path, title, sections)


def _several(layers: Sequence[str]) -> str:
    """One name for neighbouring layers that are kept alike."""
    return layers[0] if len(layers) == 1 else f"{layers[0]} .. {layers[-1].rpartition('.')[2]}"
