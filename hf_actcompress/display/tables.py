"""Tables on the console."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table as RichTable

# characters that LaTeX does not print as they are
_LATEX = str.maketrans(
    {
        **{mark: rf"\{mark}" for mark in "&%$#_{}"},
        "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
        "<": r"\textless{}", ">": r"\textgreater{}",
    }
)  # fmt: skip
# where the output is no terminal, no column is cut
_PIPE_WIDTH = 10_000


@dataclass(frozen=True)
class Table:
    """Rows of texts under column names.

    Args:
        columns: The names of the columns.
        rows: Each row has one text per column.
        numbers: The names of the columns that are aligned to the right.
        title: A text above the table.
        total: A last row, with a line above it.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[str] = ()
    title: str = ""
    total: Sequence[str] = ()

    def to_csv(self) -> str:
        """A line per row, for spreadsheets."""
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows([self.columns, *self.rows])
        return buffer.getvalue()

    def to_markdown(self) -> str:
        """A table as in README files, numbers to the right."""
        marks = ["---:" if column in self.numbers else "---" for column in self.columns]
        rows = [[text.replace("|", "\\|") for text in row] for row in (self.columns, marks, *self.rows)]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"

    def to_latex(self) -> str:
        """A tabular with lines of booktabs, for papers."""
        form = "".join("r" if column in self.numbers else "l" for column in self.columns)
        texts = ([text.translate(_LATEX) for text in row] for row in (self.columns, *self.rows))
        head, *rows = (" & ".join(row) + r" \\" for row in texts)
        begin, end = rf"\begin{{tabular}}{{{form}}}", r"\end{tabular}"
        lines = [begin, r"\toprule", head, r"\midrule", *rows, r"\bottomrule", end]
        return "\n".join(lines) + "\n"


def print_tables(tables: Iterable[Table], text: str) -> None:
    """The tables, then the text, with rich. Plain characters and whole columns where the output is no terminal."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal and not console.is_jupyter:
        console = Console(width=_PIPE_WIDTH)
    for table in tables:
        console.print(_as_rich(table, console.is_terminal or console.is_jupyter))
    # sizes and names are data: no markup, no highlighting
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _as_rich(table: Table, on_terminal: bool) -> RichTable:
    from rich.box import ASCII2, ROUNDED
    from rich.markup import escape
    from rich.table import Table as RichTable

    found = RichTable(box=ROUNDED if on_terminal else ASCII2, title=table.title or None)
    for column in table.columns:
        found.add_column(column, justify="right" if column in table.numbers else "left")
    for row in table.rows:
        found.add_row(*map(escape, row))
    if table.total:
        found.add_section()
        found.add_row(*map(escape, table.total))
    return found
