"""One HTML file that needs no other: tables, bars, and pictures inside it. It has no script and reads nothing."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ..quick.sizes import readable_size
from .tables import Table

if TYPE_CHECKING:
    from os import PathLike

_STYLE = """
:root { color-scheme: light dark; --text: #222; --page: #fff; --line: #ddd; --mark: #c00; }
@media (prefers-color-scheme: dark) { :root { --text: #ddd; --page: #161616; --line: #444; --mark: #f66; } }
body { font: 15px/1.5 sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
body { color: var(--text); background: var(--page); }
.wide { overflow-x: auto; } table { border-collapse: collapse; } img { max-width: 100%; background: #fff; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid var(--line); text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.bar { display: flex; position: relative; height: 1.25rem; margin-bottom: .5rem; background: var(--line); }
.mark { position: absolute; top: -.2rem; bottom: -.2rem; border-left: 2px solid var(--mark); }
.key { display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 .8rem; }
.card { color: var(--mark); }
"""
# of parts, told apart by most eyes on light and on dark ground (Okabe and Ito)
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")


@dataclass(frozen=True)
class HtmlBars:
    """Stacked bars on one scale, each with its parts from the largest to the smallest.

    Args:
        bars: Name -> part -> bytes.
        mark: Bytes at which every bar has a line, such as those of a card; None: no line.
        marked: What the line stands for.
    """

    bars: Mapping[str, Mapping[str, int]]
    mark: int | None = None
    marked: str = ""


@dataclass(frozen=True)
class HtmlSection:
    """A heading, a paragraph per line of text, bars, tables and pictures.

    Args:
        pictures: Alternative text -> what draws the picture as a PNG into a binary file.
    """

    heading: str
    text: str = ""
    tables: Sequence[Table] = ()
    pictures: Sequence[tuple[str, Callable[[IO[bytes]], None]]] = ()
    bars: Sequence[HtmlBars] = ()


def html_page(title: str, sections: Sequence[HtmlSection]) -> str:
    """The page. Nothing in it is fetched from elsewhere.

    Args:
        title: Of the page.
        sections: In order.

    Raises:
        MissingExtraError: There are pictures and matplotlib is not installed.
    """
    body = "\n".join(map(_section, sections))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def write_html(path: str | PathLike[str], title: str, sections: Sequence[HtmlSection]) -> None:
    """Write such a page; parent folders are made. Raises as `html_page`."""
    text = html_page(title, sections)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


def _section(section: HtmlSection) -> str:
    parts = [f"<h2>{escape(section.heading)}</h2>"]
    parts += [f"<p>{escape(line)}</p>" for line in section.text.splitlines() if line]
    parts += map(_bars, section.bars)
    parts += map(_table, section.tables)
    parts += [_picture(text, draw) for text, draw in section.pictures]
    return "\n".join(parts)


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    right = [column in table.numbers for column in table.columns]
    rows = ("".join(map(_cell, row, right)) for row in table.rows)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _bars(found: HtmlBars) -> str:
    totals: Counter[str] = Counter()
    for parts in found.bars.values():
        totals.update(parts)
    colours = {part: _COLOURS[i % len(_COLOURS)] for i, (part, _) in enumerate(totals.most_common())}
    scale = max((*(sum(parts.values()) for parts in found.bars.values()), found.mark or 0, 1))
    keys = "".join(f'<span class="key" style="background:{c}"></span>{escape(part)}' for part, c in colours.items())
    lines = [f"<p>{keys}</p>"]
    if found.mark is not None:
        lines.append(f'<p class="card">the line: {escape(found.marked)}, {readable_size(found.mark)}</p>')
    return "\n".join([*lines, *(_bar(name, parts, found.mark, scale, colours) for name, parts in found.bars.items())])


def _bar(name: str, parts: Mapping[str, int], mark: int | None, scale: int, colours: Mapping[str, str]) -> str:
    # all bars of a page have their parts in the same order
    pieces = "".join(
        f'<span style="width:{100 * parts[part] / scale:.3f}%;background:{colour}" '
        f'title="{escape(part)}: {readable_size(parts[part])}"></span>'
        for part, colour in colours.items()
        if parts.get(part)
    )
    line = "" if mark is None else f'<span class="mark" style="left:{100 * mark / scale:.3f}%"></span>'
    label = f"{escape(name)}: {readable_size(sum(parts.values()))}"
    return f'<div>{label}</div><div class="bar">{pieces}{line}</div>'


def _cell(text: str, right: bool) -> str:
    return f'<td class="number">{escape(text)}</td>' if right else f"<td>{escape(text)}</td>"


def _picture(text: str, draw: Callable[[IO[bytes]], None]) -> str:
    buffer = io.BytesIO()
    draw(buffer)
    encoded = base64.b64encode(buffer.getvalue()).decode("ascii")
    return f'<p><img alt="{escape(text)}" src="data:image/png;base64,{encoded}"></p>'
