"""Which tokens of a batch see which, and the pieces in which attention is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby, pairwise

from torch import Tensor

# how many queries share one call of attention where one call would need a mask of all tokens by all tokens
WINDOW_STEP = 256


@dataclass(frozen=True)
class Group:
    """Neighbouring sequences of one length in one row."""

    row: int
    start: int
    count: int
    length: int

    def part(self, x: Tensor, begin: int, end: int) -> Tensor:
        """The tokens [begin, end) of each sequence, [count, H, end - begin, ...]: a view of x [B, H, T, ...]."""
        stop = self.start + self.count * self.length
        sequences: Tensor = x[self.row, :, self.start : stop].unflatten(1, (self.count, self.length))  # type: ignore[no-untyped-call]
        return sequences[:, :, begin:end].transpose(0, 1)


@dataclass(frozen=True)
class Band:
    """Rows of one sequence each, in which some tokens are padding, or whose windows reach to both sides.

    Attributes:
        rows, tokens: B and T.
        causal: Whether a token sees no token after it; otherwise it sees as many after it as before it.
        chunked: Whether a token sees only its own chunk. Chunks have the window's length, and the first one begins
            after the padding on the left.
    """

    rows: int
    tokens: int
    causal: bool
    chunked: bool = False

    @staticmethod
    def part(x: Tensor, begin: int, end: int) -> Tensor:
        """The tokens [begin, end) of all rows: a view of x [B, H, T, ...]."""
        return x[:, :, begin:end]

    def shares_keys(self, window: int | None) -> bool:
        """Whether queries of several pieces see the same keys."""
        return self.tokens > WINDOW_STEP and (self.causal or window is not None)

    def blocks(self, window: int | None) -> Iterator[tuple[int, int, int, int]]:
        """The queries [begin, end) of each block, and the keys [first, last) that any of them may see.

        Args:
            window: How many keys a query sees on one side, itself included; None: all.
        """
        length = self.tokens
        # padding hides the same keys from all queries, so they can share a call
        step = length if window is None and not self.causal else WINDOW_STEP
        for begin in range(0, length, step):
            end = min(begin + step, length)
            first = 0 if window is None else max(begin - window + 1, 0)
            last = end if self.causal else length if window is None else min(end + window - 1, length)
            yield begin, end, first, last


@dataclass(frozen=True)
class Sequences:
    """The sequences of packed rows [B, T]. It holds no tensor.

    Attributes:
        rows, tokens: B and T.
        starts: Where each sequence starts in the B * T tokens of all rows, and B * T at the end. No sequence goes on
            in the next row.
    """

    rows: int
    tokens: int
    starts: tuple[int, ...]

    def cut(self, length: int) -> Sequences:
        """Each sequence divided into parts of that length, and a shorter last part."""
        parts = (range(start, end, length) for start, end in pairwise(self.starts))
        return Sequences(self.rows, self.tokens, (*chain.from_iterable(parts), self.starts[-1]))

    @cached_property
    def longest(self) -> int:
        """The number of tokens of the longest sequence."""
        return max((end - start for start, end in pairwise(self.starts)), default=0)

    def shares_keys(self, window: int | None) -> bool:
        """Whether queries of several pieces see the same keys."""
        return window is not None and window < self.longest

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """All sequences in order."""
        found = []
        kinds = ((start // self.tokens, end - start, start % self.tokens) for start, end in pairwise(self.starts))
        for (row, length), same in groupby(kinds, lambda kind: kind[:2]):
            places: Sequence[int] = [place for _, _, place in same]
            found.append(Group(row, places[0], len(places), length))
        return tuple(found)


def sequences_of(position_ids: Tensor) -> Sequences | None:
    """The sequences of rows with these positions [B, T]; None if each row is one sequence. Waits for the device.

    A sequence ends where the next position is not one more, as in transformers' `find_packed_sequence_indices`.
    """
    rows, tokens = position_ids.shape
    breaks = (position_ids.diff(dim=1) != 1).nonzero().tolist()
    if not breaks:
        return None
    inside = [row * tokens + place + 1 for row, place in breaks]
    return Sequences(rows, tokens, (*sorted({*range(0, rows * tokens, tokens), *inside}), rows * tokens))


def chunks(length: int, window: int | None) -> Iterator[tuple[int, int, int]]:
    """The queries [begin, end) of each chunk of a sequence, and the first key that they see.

    In the first chunk each query sees all keys before it. In the others it sees `window` keys, itself included.
    """
    first = length if window is None else min(window, length)
    yield 0, first, 0
    for begin in range(first, length, WINDOW_STEP):
        yield begin, min(begin + WINDOW_STEP, length), begin - first + 1
