"""The table of `hf-actcompress estimate`: its question, its rows, and the JSON of both."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import ActCompressError
from ..quick.formula import longest
from ..quick.headroom import MOST_SHARE
from ..quick.strategies import recommended
from .remedies import Remedy
from .strategies import MOST, Row, Strategy

if TYPE_CHECKING:
    from ..memory.estimation.estimates import Estimates
    from ..quick.diffusion import Latents

COLUMNS = ("strategy", "peak", "kept", "fits", "largest batch", "longest", "extra time", "gradients")
# the most estimates that a search for the largest batch size may take
_ESTIMATES = 8


@dataclass
class EstimateTable:
    """The rows, and the question that they answer.

    Args:
        model: The model's name.
        batch_size, seq_len: Sequences, and tokens per sequence.
        options: Options of `Estimates`.
        room, gpu: The card's bytes, and the card as it was given.
        max_context: Whether the longest sequences are searched for as well.
        presets: The presets that were asked for; empty: the strategies of general use.
        steps: Tokens per sequence of the steps that the allocator is replayed for; empty: all alike.
        as_json, has_page: Whether the answer is printed as JSON, and whether a page shows it, too.
        latents: What a sample of a model of diffusers is; None for a model of transformers.
        rows: The rows that are known so far.
        evaluation_bytes: Bytes that the evaluation of such a batch needs.
        assumed: What the figures depend on.
        fits: Whether one of the rows that were asked for fits.
        instead: Changes with which the training would fit, if no row does.
    """

    model: str
    batch_size: int
    seq_len: int
    options: dict[str, Any]
    room: int | None
    gpu: str | None
    max_context: bool
    presets: Sequence[str]
    steps: tuple[int, ...]
    as_json: bool
    has_page: bool
    latents: Latents | None = None
    rows: list[Row] = field(default_factory=list)
    evaluation_bytes: int = 0
    assumed: str = ""
    fits: bool = True
    instead: list[Remedy] = field(default_factory=list)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns. Whether a row fits is only known if there is a card."""
        return columns_of(self.room is not None, self.max_context)

    @property
    def recommended(self) -> str | None:
        """The name of the row to start with; without a card the least change that saves memory."""
        known = [row for row in self.rows if row.estimate is not None and (self.room or row.strategy.config)]
        verdicts = ((row, "yes" if self.room is None else row.verdict(self.room)) for row in known)
        return recommended((row.strategy.name, row.strategy.known, verdict) for row, verdict in verdicts)


def columns_of(has_card: bool, max_context: bool) -> tuple[str, ...]:
    """Names of the columns of a table: with the longest sequences it has no room for what is kept."""
    left_out: tuple[str, ...] = ("kept",) if max_context else ("longest",)
    left_out += () if has_card else ("fits", "largest batch")
    return tuple(column for column in COLUMNS if column not in left_out)


def rows(several: Estimates, strategies: tuple[Strategy, ...], table: EstimateTable) -> Iterator[Row]:
    """The estimates that the table asks for, one after the other, because each takes seconds.

    An error of the first strategy is raised; another one that fails gets a row that says why.
    """
    for index, strategy in enumerate(strategies):
        try:
            yield _row(several, strategy, table)
        except ActCompressError as error:
            if index == 0:
                raise
            yield Row(strategy, None, why_not=str(error))


def _row(several: Estimates, strategy: Strategy, table: EstimateTable) -> Row:
    from ..memory.estimation.largest import positions_of

    room, by_role = table.room, table.as_json or table.has_page
    case = table.batch_size, table.seq_len, strategy.patched_with, strategy.checkpointing
    found = several.estimate(*case, by_role=by_role)
    peaks = {table.batch_size: found.device_bytes}
    if room is None:
        return Row(strategy, found, peaks)
    if found.device_bytes <= room < MOST_SHARE * found.device_bytes:
        # the JSON has both shares, also where the first one fits
        enough = 0 if table.as_json else room
        found = several.replayed(*case, lengths=table.steps, room=enough, by_role=by_role)

    def peak(batch_size: int) -> int:
        return several.device_bytes(batch_size, *case[1:])

    state = found.device_bytes - found.step_peak_bytes
    most = _largest(peaks, room, state, peak, several.guess(*case, room))
    if not table.max_context:
        return Row(strategy, found, peaks, most)
    tokens = longest(
        lambda s: several.device_bytes(case[0], s, *case[2:]),
        room,
        positions_of(several.model),
        case[0] if case[3] else None,
    )
    return Row(strategy, found, peaks, most, tokens)


def _largest(peaks: dict[int, int], room: int, state: int, peak: Callable[[int], int], guess: int | None = None) -> int:
    """The largest batch size within `room`, by the search that is used on a card.

    Args:
        peaks: Batch size -> bytes, for the sizes that were tried; those tried here are added.
        room, state: Bytes of the card, and bytes that are in use without activations.
        peak: Gives the bytes for a batch size.
        guess: The first size to try.
    """
    from ..memory.batch_size.report import BatchSizeTrial
    from ..memory.batch_size.search import Search

    start = next(iter(peaks))
    most = max(MOST, start)
    search = Search(start, most, _ESTIMATES)
    while not search.settled(room) and (batch_size := search.candidate(room)) is not None:
        if len(search.tried) == 1 and guess is not None and (guess > start) == (peaks[start] <= room):
            batch_size = min(guess, most)
        elif len(search.tried) == 2 and peaks[start] <= room < peaks[second := search.tried[1].batch_size]:
            # the point where the line through both peaks meets `room`; a search on a card would not go so far in one
            # step
            batch_size = start + max(1, (room - peaks[start]) * (second - start) // (peaks[second] - peaks[start]))
        if batch_size not in peaks:
            peaks[batch_size] = peak(batch_size)
        search.add(BatchSizeTrial(batch_size, peaks[batch_size] <= room, peaks[batch_size]), state)
    return max((trial.batch_size for trial in search.tried if trial.fits), default=0)


def as_data(table: EstimateTable) -> dict[str, Any]:
    """The data that --json prints."""
    room = table.room

    def data(row: Row) -> dict[str, Any]:
        strategy = row.strategy
        return {
            "strategy": strategy.name,
            "preset": strategy.config,
            "gradient_checkpointing": strategy.checkpointing,
            "checkpoint_input": strategy.checkpoint_input,
            "peak_bytes": row.estimate.device_bytes if row.estimate is not None else None,
            "kept_bytes": row.estimate.kept_bytes if row.estimate is not None else None,
            "fits": row.fits(room) if room is not None else None,
            "tight": row.tight(room) if room is not None else None,
            "largest_batch_size": row.largest,
            "longest_sequences": row.longest,
            "extra_time": strategy.time,
            "gradients": strategy.gradients,
            "why_not": row.why_not or None,
            "estimate": json.loads(row.estimate.to_json()) if row.estimate is not None else None,
        }

    return {
        "model": table.model,
        "gpu_bytes": room,
        "assumed": table.assumed,
        "evaluation_bytes": table.evaluation_bytes,
        "rows": [data(row) for row in table.rows],
        "recommended": table.recommended,
        "remedies": [asdict(remedy) for remedy in table.instead],
    }
