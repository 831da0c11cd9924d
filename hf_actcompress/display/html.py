"""One HTML file that needs no other: tables, bars, curves, and a script that sorts the tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from ..quick.colours import part_colours, way_colour
from ..quick.sizes import readable_size
from .tables import Table

if TYPE_CHECKING:
    from os import PathLike

    from .pictures import Curve

_STYLE = """
:root { color-scheme: light dark; --text: #222; --page: #fff; --line: #ddd; --mark: #c00; }
@media (prefers-color-scheme: dark) { :root { --text: #ddd; --page: #161616; --line: #444; --mark: #ff7b7b; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 0 auto; padding: 1rem; }
body { color: var(--text); background: var(--page); overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.25rem; margin-top: 2rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; } svg { width: 100%; min-width: 36rem; }
.axis { stroke: var(--line); fill: none; } text { fill: var(--text); font-size: 15px; }
.below { text-anchor: middle; } .beside { text-anchor: end; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid var(--line); text-align: left; overflow-wrap: normal; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th button { font: inherit; color: inherit; background: none; border: 0; padding: 0; cursor: pointer; }
th button::after { content: "\\2195"; margin-left: .3rem; opacity: .6; }
th[aria-sort=ascending] button::after { content: "\\2191"; opacity: 1; }
th[aria-sort=descending] button::after { content: "\\2193"; opacity: 1; }
:focus-visible { outline: 3px solid #2f7ded; outline-offset: 2px; }
.bar { display: flex; position: relative; height: 1.25rem; margin-bottom: .5rem; background: var(--line); }
.bar .part { box-shadow: inset -1px 0 var(--page); }
.mark { position: absolute; top: -.2rem; bottom: -.2rem; border-left: 3px solid var(--mark); }
.keys { display: flex; flex-wrap: wrap; gap: .2rem 1rem; list-style: none; padding: 0; }
.key { display: inline-block; width: .9rem; height: .9rem; margin-right: .35rem; vertical-align: -.1rem; }
.card { color: var(--mark); }
@media (max-width: 32rem) { th, td { padding: .25rem .4rem; } h1 { font-size: 1.3rem; } }
"""
# sorts the rows by a column, upwards or downwards; a browser without scripts shows the same rows unsorted
_SCRIPT = """
const UNITS = { B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30 };
function value(text) {
  const found = text.match(/^([0-9.]+)[+]?(?: (B|KiB|MiB|GiB))?$/);
  return found ? found[1] * (UNITS[found[2]] || 1) : text;
}
function order(a, b) {
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
}
for (const head of document.querySelectorAll("th")) {
  const button = document.createElement("button"), line = head.parentNode;
  button.type = "button";
  button.append(...head.childNodes);
  head.append(button);
  button.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== (head.className ? "descending" : "ascending");
    const sign = up === !head.className ? 1 : -1;
    const rows = [...line.parentNode.rows].slice(1);
    rows.sort((a, b) => sign * order(...[a, b].map((row) => value(row.cells[head.cellIndex].textContent))));
    line.parentNode.append(...rows);
    for (const other of line.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  });
}
"""
# the page may load nothing from a file or a network
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
# the size of the picture of curves inside its axes, in pixels on a wide screen, and the space for the axes' texts
_WIDTH, _HEIGHT, _LEFT, _BELOW = 1000, 300, 90, 45
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


@dataclass(frozen=True)
class HtmlBars:
    """Stacked bars on one scale, each with its parts from the largest to the smallest.

    Args:
        bars: Name -> part -> bytes.
        mark: Number of bytes at which a line crosses every bar, such as the size of a card; None: no line.
        marked: What the line stands for.
    """

    bars: Mapping[str, Mapping[str, int]]
    mark: int | None = None
    marked: str = ""


@dataclass(frozen=True)
class HtmlSection:
    """A heading, a paragraph per line of text, bars, tables, and curves of bytes over time by their names."""

    heading: str
    text: str = ""
    tables: Sequence[Table] = ()
    bars: Sequence[HtmlBars] = ()
    curves: Mapping[str, Curve] = field(default_factory=dict)


def html_page(title: str, sections: Sequence[HtmlSection]) -> str:
    """The page. Nothing in it is fetched from elsewhere."""
    body = "\n".join(map(_section, sections))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n{body}\n<script>{_SCRIPT}</script></body></html>\n"
    )


def write_html(path: str | PathLike[str], title: str, sections: Sequence[HtmlSection]) -> None:
    """Write such a page; parent folders are made."""
    text = html_page(title, sections)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


def _section(section: HtmlSection) -> str:
    parts = [f"<h2>{escape(section.heading)}</h2>"]
    parts += [f"<p>{escape(line)}</p>" for line in section.text.splitlines() if line]
    parts += map(_bars, section.bars)
    parts += map(_table, section.tables)
    parts += [_curves(section.curves)] if section.curves else []
    return "\n".join(parts)


def _table(table: Table) -> str:
    right = [column in table.numbers for column in table.columns]
    head = "".join(map(partial(_cell, tag="th"), table.columns, right))
    rows = ("".join(map(_cell, row, right)) for row in table.rows)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="wide" tabindex="0"><table><tr>{head}</tr>{body}</table></div>'


def _bars(found: HtmlBars) -> str:
    totals: Counter[str] = Counter()
    for parts in found.bars.values():
        totals.update(parts)
    colours = part_colours(part for part, _ in totals.most_common())
    # 2% more than the mark, so that its line is visible inside the bars and not at their very end
    scale = max((*(sum(parts.values()) for parts in found.bars.values()), int(1.02 * (found.mark or 0)), 1))
    lines = [_keys(colours)]
    if found.mark is not None:
        lines.append(f'<p class="card">the line: {escape(found.marked)}, {readable_size(found.mark)}</p>')
    return "\n".join([*lines, *(_bar(name, parts, found.mark, scale, colours) for name, parts in found.bars.items())])


def _keys(colours: Mapping[str, str]) -> str:
    keys = (f'<li><span class="key" style="background:{c}"></span>{escape(part)}</li>' for part, c in colours.items())
    return f'<ul class="keys">{"".join(keys)}</ul>'


def _curves(curves: Mapping[str, Curve]) -> str:
    """Draw all curves on the same axes, with a dotted line where the backward and the optimizer begin.

    Each curve is as wide as the picture: the profiled times of single steps say nothing about how fast they are.
    """
    colours = {name: way_colour(name) for name in curves}
    most = max((curve.peak_bytes for curve in curves.values()), default=0)
    up = _HEIGHT / (most or 1)
    lines = _axes(most)
    for name, curve in curves.items():
        across = _WIDTH / ((curve.seconds[-1] if curve.seconds else 0) or 1.0)
        style = f'fill="none" stroke="{colours[name]}"'
        steps = "".join(
            f"H{second * across:.1f}V{_HEIGHT - nbytes * up:.1f}"
            for second, nbytes in zip(curve.seconds, curve.bytes, strict=True)
        )
        lines.append(f'<path {style} stroke-width="2" d="M0 {_HEIGHT}{steps}"/>')
        begins = [span[0] * across for span in (curve.backward, curve.optimizer) if span is not None]
        lines += [f'<path {style} stroke-dasharray="2 3" d="M{x:.1f} 0V{_HEIGHT}"/>' for x in begins]
    text = f"the time of a step across, {readable_size(most)} above the start up; dotted: backward begins"
    box = f"{-_LEFT} -12 {_LEFT + _WIDTH + 45} {_HEIGHT + _BELOW + 12}"
    svg = f'<svg role="img" aria-label="{escape(text)}" viewBox="{box}">{"".join(lines)}</svg>'
    return f'{_keys(colours)}\n<div class="wide" tabindex="0">{svg}</div>\n<p>{escape(text)}</p>'


def _axes(most: int) -> list[str]:
    """Both axes with their units, and a line across at each tick of the bytes."""
    lines = []
    for tick in _ticks(100):
        x = _WIDTH * tick / 100
        lines.append(f'<text class="below" x="{x:.1f}" y="{_HEIGHT + 18}">{tick:g}</text>')
    name, unit = next((found for found in _UNITS if most >= found[1]), _UNITS[-1])
    for tick in _ticks(most / unit):
        y = _HEIGHT * (1 - tick * unit / (most or 1))
        lines.append(f'<path class="axis" d="M0 {y:.1f}H{_WIDTH}"/>')
        lines.append(f'<text class="beside" x="-8" y="{y + 5:.1f}">{tick:g} {name}</text>')
    lines.append(f'<path class="axis" d="M0 0V{_HEIGHT}H{_WIDTH}"/>')
    lines.append(f'<text class="below" x="{_WIDTH / 2}" y="{_HEIGHT + 38}">% of the time</text>')
    return lines


def _ticks(most: float) -> list[float]:
    """Three to six round numbers from 0 to `most`."""
    if most <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(most))
    step = next(step for step in (power / 5, power / 2, power, 2 * power) if most / step < 6)
    return [round(i * step, 9) for i in range(int(most / step + 1e-9) + 1)]


def _bar(name: str, parts: Mapping[str, int], mark: int | None, scale: int, colours: Mapping[str, str]) -> str:
    # all bars of one `HtmlBars` have their parts in the same order, that of the colours
    pieces = "".join(
        f'<span class="part" style="width:{100 * parts[part] / scale:.3f}%;background:{colour}" '
        f'title="{escape(part)}: {readable_size(parts[part])}"></span>'
        for part, colour in colours.items()
        if parts.get(part)
    )
    line = "" if mark is None else f'<span class="mark" style="left:{100 * mark / scale:.3f}%"></span>'
    label = f"{escape(name)}: {readable_size(sum(parts.values()))}"
    return f'<div>{label}</div><div class="bar">{pieces}{line}</div>'


def _cell(text: str, right: bool, tag: str = "td") -> str:
    return f'<{tag} class="number">{escape(text)}</{tag}>' if right else f"<{tag}>{escape(text)}</{tag}>"
