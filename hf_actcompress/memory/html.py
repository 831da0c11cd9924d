"""One HTML file that needs no other: tables, and pictures inside it."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from os import PathLike

_STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; } img { max-width: 100%; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #ddd; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
"""


@dataclass(frozen=True)
class HtmlTable:
    """Rows of texts under column names; columns in `numbers` stand to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[str] = ()


@dataclass(frozen=True)
class HtmlSection:
    """A heading, a paragraph per line of text, tables and pictures.

    Args:
        pictures: Alternative text -> what draws the picture as a PNG into a binary file.
    """

    heading: str
    text: str = ""
    tables: Sequence[HtmlTable] = ()
    pictures: Sequence[tuple[str, Callable[[IO[bytes]], None]]] = ()


def write_html(path: str | PathLike[str], title: str, sections: Sequence[HtmlSection]) -> None:
    """Write the page. Nothing in it is fetched from elsewhere.

    Args:
        path: Where to write; parent folders are made.
        title: Of the page.
        sections: In order.

    Raises:
        MissingExtraError: There are pictures and matplotlib is not installed.
    """
    body = "\n".join(map(_section, sections))
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page, encoding="utf-8")


def _section(section: HtmlSection) -> str:
    parts = [f"<h2>{escape(section.heading)}</h2>"]
    parts += [f"<p>{escape(line)}</p>" for line in section.text.splitlines() if line]
    parts += map(_table, section.tables)
    parts += [_picture(text, draw) for text, draw in section.pictures]
    return "\n".join(parts)


def _table(table: HtmlTable) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    right = [column in table.numbers for column in table.columns]
    rows = ("".join(map(_cell, row, right)) for row in table.rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _cell(text: str, right: bool) -> str:
    return f'<td class="number">{escape(text)}</td>' if right else f"<td>{escape(text)}</td>"


def _picture(text: str, draw: Callable[[IO[bytes]], None]) -> str:
    buffer = io.BytesIO()
    draw(buffer)
    encoded = base64.b64encode(buffer.getvalue()).decode("ascii")
    return f'<p><img alt="{escape(text)}" src="data:image/png;base64,{encoded}"></p>'
