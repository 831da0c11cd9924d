"""How the answer of `hf-actcompress estimate` is printed: a table of 80 columns, and the lines below it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..quick.headroom import ADVICE
from ..quick.sizes import readable_size
from ..quick.strategies import EXACT, STRATEGIES, TIMES, StrategyRow
from .common import Rows, indented, patch_code, wrapped
from .estimate_table import EstimateTable
from .remedies import as_lines
from .strategies import MOST, Row, Strategy

# column -> its two lines of heading, and its width: the table has 80 columns. The second line of a size is its unit
_COLUMNS = {
    "strategy": (("", "strategy"), 24), "peak": (("peak", ""), 6), "kept": (("kept", ""), 6),
    "fits": (("", "fits"), 5), "largest batch": (("largest", "batch"), 7), "longest": (("most", "tokens"), 6),
    "extra time": (("extra", "time"), 8), "gradients": (("", "gradients"), 12),
}  # fmt: skip
_SIZES = ("peak", "kept")
RIGHT = (*_SIZES, "largest batch", "longest")
# the columns of a table whose largest size is smaller are in MiB
_IN_MIB = 2 * 2**30


def cells_of(row: Row, table: EstimateTable) -> tuple[str, ...]:
    """A row as texts, by column; sizes have their units."""
    texts = _texts(row, table.room)
    return tuple(
        readable_size(int(text)) if name in _SIZES and text.isdecimal() else text
        for name, text in texts.items()
        if name in table.columns
    )


def _texts(row: Row, room: int | None) -> dict[str, str]:
    """A row by column. Sizes are in bytes."""
    strategy = row.strategy
    if row.estimate is None:
        return {**dict.fromkeys(_COLUMNS, "-"), "strategy": strategy.name}
    return {
        "strategy": strategy.name,
        "peak": str(row.estimate.device_bytes),
        "kept": str(row.estimate.kept_bytes),
        "fits": "no" if room is None else row.verdict(room),
        "largest batch": at_least(row.largest),
        "longest": "-" if row.longest is None else str(row.longest),
        "extra time": strategy.time,
        "gradients": strategy.gradients,
    }


def at_least(largest: int | None) -> str:
    """The largest batch as text."""
    return "-" if largest is None else f"{largest}+" if largest >= MOST else str(largest)


class TextTable:
    """The table as text of 80 columns, in which each row can be printed as soon as it is known.

    Args:
        columns: Names of the columns.
        largest: The largest size, which says in which unit all sizes are.
    """

    def __init__(self, columns: Sequence[str], largest: int) -> None:
        self._columns = columns
        self._rows = Rows({name: _COLUMNS[name][1] for name in columns}, RIGHT)
        self._unit, self._digits, self._name = (2**20, 1, "MiB") if largest < _IN_MIB else (2**30, 2, "GiB")

    def heading(self) -> str:
        """Two lines."""
        lines = ([_COLUMNS[name][0][line] for name in self._columns] for line in range(2))
        first, second = ([text or "" for text in line] for line in lines)
        second = [self._name if name in _SIZES else text for name, text in zip(self._columns, second, strict=True)]
        return f"{self._rows.line(first)}\n{self._rows.line(second)}"

    def line(self, texts: Mapping[str, str]) -> str:
        """A row; sizes are given in bytes."""
        return self._rows.line([self._size(texts[name]) if name in _SIZES else texts[name] for name in self._columns])

    def _size(self, text: str) -> str:
        return f"{int(text) / self._unit:.{self._digits}f}" if text.isdecimal() else text


def text_table(table: EstimateTable) -> TextTable:
    """The layout, once the first row is known: that is stock's, whose peak is the largest."""
    first = table.rows[0].estimate
    return TextTable(table.columns, 0 if first is None else first.device_bytes)


def text_row(row: Row, table: EstimateTable) -> Mapping[str, str]:
    """A row for `TextTable.line`."""
    return _texts(row, table.room)


def text_of(table: EstimateTable) -> str:
    """The whole answer, as it is printed without --json."""
    text = text_table(table)
    rows = [text.line(_texts(row, table.room)) for row in table.rows]
    return "\n".join([text.heading(), *rows, explanation(table)])


def explanation(table: EstimateTable) -> str:
    """The lines below the rows."""
    return "\n".join(["", *map(wrapped, _prose(table)), *as_lines(table.instead), *_advised(table)])


def _advised(table: EstimateTable) -> Iterator[str]:
    """The row to start with, and the code to copy."""
    name = table.recommended
    if name is not None:
        known = STRATEGIES.get(name) or Strategy(name, name).known
        yield from recommendation(name, known, diffusion=table.latents is not None)


def recommendation(name: str, known: StrategyRow, *, diffusion: bool = False) -> Iterator[str]:
    """A line about a row, and the code that trains so; `diffusion` if it is for a model of diffusers."""
    yield f"recommended: {name} (gradients {known.gradients}, extra time {known.time})"
    code = patch_code(known.config, known.checkpointing, known.checkpoint_input, diffusion=diffusion)
    yield indented(code) if code else "    there is nothing to patch"


def _prose(table: EstimateTable) -> Iterator[str]:
    found, room = table.rows, table.room
    yield f"assumed: {table.assumed}"
    yield from meanings([row.strategy.known for row in found])
    yield from (
        f"{row.strategy.name}: does not work with this model: {row.why_not}" for row in found if row.estimate is None
    )
    yield from dict.fromkeys(note for row in found if row.estimate is not None for note in row.estimate.notes)
    logits = ", all logits in memory" if table.latents is None else ""
    yield f"evaluation with this batch{logits}: {readable_size(table.evaluation_bytes)}"
    if room is None:
        return
    yield from _advice(found, room, table.steps)
    fitting = [row.strategy.name for row in found if row.fits(room)]
    yield f"fits on {table.gpu}: {', '.join(fitting) if fitting else 'none of these'}"


def meanings(found: Sequence[StrategyRow]) -> Iterator[str]:
    """What the words of the table mean."""
    yield "peak: the memory that the card must have, including CUDA's context"
    used = {known.time for known in found}
    yield from (f"extra time, {name}: {text}" for name, text in TIMES.items() if name in used and name != "none")
    if any(known.gradients != EXACT for known in found):
        yield "lossy gradients: fidelity_report(model, batch) measures their error"


def _advice(rows: list[Row], room: int, steps: Sequence[int]) -> Iterator[str]:
    """For each tight row, what "tight" means and whether the allocator's setting would help."""
    tight = [row for row in rows if row.tight(room)]
    for row in tight:
        found = row.estimate
        if found is None or found.reserved_share is None or found.reserved_share_expandable is None:
            continue
        shares = found.reserved_share, found.reserved_share_expandable
        defaults, expandable = (f"{readable_size(found.reserved_bytes(share))} ({share:.2f} times)" for share in shares)
        helps = "fits" if found.reserved_bytes(shares[1]) <= room else "is still too much"
        yield (
            f"tight: for {row.strategy.name} the allocator reserves {defaults} unless it has to release segments; "
            f"with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True {expandable}, which {helps}"
        )
    if any(row.estimate is not None and row.estimate.reserved_share is None for row in tight):
        yield ADVICE
    if tight and steps:
        yield f"the shares are for batches of {', '.join(map(str, steps))} tokens per sequence, in this order"
    elif tight:
        yield "the allocator reserves more if batches differ in length; the shares are for batches of equal length"
