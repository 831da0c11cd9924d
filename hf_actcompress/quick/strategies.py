"""The strategies in the table of `estimate`; the page reads them from the same `strategies.json`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

# what a strategy costs in time, from the least to the most
TIMES = {
    "none": "as stock",
    "low": "recomputes what is cheap, in backward",
    "medium": "recomputes what is cheap, and packs and unpacks what is kept",
    "mlp": "a second forward of the MLPs: a fifth more arithmetic; up to two fifths if weights are frozen",
    "forward": "a second forward: a third more arithmetic, half if weights are frozen",
    "transfer": "limited by the link to host memory",
}
EXACT = "exact"


class StrategyRow(NamedTuple):
    """A row of the table: what the model is patched with (None: nothing), whether gradient checkpointing is on, the
    codec of the checkpoints if it is not the preset's, a key of TIMES, and what happens to gradients.
    """

    config: str | None
    checkpointing: bool
    checkpoint_input: str | None
    time: str
    gradients: str


# name -> the strategy
STRATEGIES: dict[str, StrategyRow] = {
    name: StrategyRow(*row)
    for name, row in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")).items()
}


def recommended(rows: Iterable[tuple[str, StrategyRow, str]]) -> str | None:
    """The name of the row to start with, of (name, strategy, what `fits` says of it); None if nothing fits.

    Exact rows come before lossy ones, then those that are not tight, then those that take less time.
    """

    def order(row: tuple[str, StrategyRow, str]) -> tuple[bool, bool, int]:
        _, known, fits = row
        return known.gradients != EXACT, fits == "tight", list(TIMES).index(known.time)

    fitting = [row for row in rows if row[2] != "no"]
    return min(fitting, key=order)[0] if fitting else None
