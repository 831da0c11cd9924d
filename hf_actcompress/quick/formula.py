"""The formula: bytes as polynomials in a model's sizes, and the highest of a few of them for the peak.

`resources/formula.js` holds the same in JavaScript. A test runs both on the same inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .optimizers import FOREACH

# for each summand in turn, the number of its term and its coefficient
Terms = Sequence[float]

# as in reference/logits_chunks.py: the elements of a chunk of logits, at least and at most, and the number of
# which its rows or columns are a multiple
LEAST_CHUNK, MOST_CHUNK, ALIGNMENT = 1 << 24, 1 << 28, 16
# as there: when the logits are kept to backward
KEPT_BYTES, KEPT_GRADIENTS = 1 << 28, 2
# as in modules/tiled.py: the fewest rows of a tile of a checkpointed layer
LEAST_ROWS = 8192

# after this many numbers that do not halve the interval, `largest` halves it
_SLOW = 4


@dataclass(frozen=True)
class QuickEstimate:
    """Memory of training by part, in bytes; the fields are those of `Estimate`."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    kept_by_role: Mapping[str, int]
    step_peak_bytes: int
    optimizer_step_bytes: int
    context_bytes: int

    @property
    def kept_bytes(self) -> int:
        """The bytes that are alive between forward and backward."""
        return sum(self.kept_by_role.values())

    @property
    def state_bytes(self) -> int:
        """What is alive between two steps."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def device_bytes(self) -> int:
        """The bytes that the card needs."""
        return self.state_bytes + max(self.step_peak_bytes, self.optimizer_step_bytes) + self.context_bytes


def with_chunks(sizes: Mapping[str, float]) -> dict[str, float]:
    """The sizes, and the chunks of logits that follow from them.

    Args:
        sizes: Of the model and the batch: batch, seq, hidden, ffn, vocab, head, kv_heads, groups, rank, positions,
            layers; tile (rows of a tile, if there are so many); experts of a mixture, and how many of them are active.
    """
    tokens, vocab = sizes["batch"] * sizes["seq"], sizes["vocab"]
    return {
        **sizes,
        "labels": sizes["seq"] - 1,
        "tile": min(sizes["tile"], tokens),
        "columns": _chunk(vocab, tokens, tokens * sizes["hidden"]),
        "rows": _chunk(tokens, vocab, tokens * sizes["hidden"]),
        "few_rows": _chunk(tokens, vocab, 0),
    }


def _chunk(total: float, others: float, budget: float) -> float:
    budget = min(max(budget, LEAST_CHUNK), MOST_CHUNK)
    return min(max(budget // others // ALIGNMENT, 1) * ALIGNMENT, total)


def kept_logits(sizes: Mapping[str, float]) -> int:
    """Bytes of logits that a trained head keeps; 0 if backward makes them again. The formula is traced for that.

    Where they are kept, backward holds a chunk of the same size beside them, and this is where a small step has its
    peak.
    """
    tokens = sizes["batch"] * sizes["seq"]
    nbytes = tokens * sizes["vocab"] * sizes["logits_itemsize"]
    return int(nbytes) if tokens <= KEPT_GRADIENTS * sizes["hidden"] and nbytes <= KEPT_BYTES else 0


def tile_of(sizes: Mapping[str, float]) -> dict[str, float]:
    """The rows of a tile of a checkpointed layer; nothing if it has too few rows for tiles."""
    tokens = sizes["batch"] * sizes["seq"]
    count = tokens // LEAST_ROWS
    return {"tile": -(-tokens // count)} if count > 1 else {}


def term_values(terms: Sequence[Mapping[str, int]], sizes: Mapping[str, float]) -> list[float]:
    """Each product of sizes."""
    return [math.prod((sizes[name] ** power for name, power in term.items()), start=1.0) for term in terms]


def total(polynomial: Terms, values: Sequence[float]) -> float:
    """A sum of products of sizes."""
    return sum(values[int(term)] * factor for term, factor in zip(polynomial[::2], polynomial[1::2], strict=True))


def evaluate(data: Mapping[str, Any], case: Sequence[int], optimizer: str, sizes: Mapping[str, float]) -> QuickEstimate:
    """The estimate of one case of an architecture class at some sizes.

    Args:
        data: The class's file of `data/`.
        case: The indices of its state and its step in `data`; if layers with many rows run in tiles, also that of the
            step with tiles.
        optimizer: Name of an optimizer.
        sizes: As for `with_chunks`; the bytes of Adafactor's step; and those of a logit that a head may keep, or 0.
    """
    tiled = tile_of(sizes) if len(case) > 2 else {}
    values = term_values(data["terms"], with_chunks({**sizes, **tiled}))
    state, step = data["states"][case[0]], data["steps"][case[2 if tiled else 1]]

    def nbytes(number: int) -> int:
        return round(total(data["sums"][number], values))

    gradients, logits = nbytes(state["gradients"]), kept_logits(sizes)
    kept = {role: nbytes(number) for role, number in step["kept"].items()}
    if logits:
        kept["loss_head"] = kept.get("loss_head", 0) + logits
    return QuickEstimate(
        weights_bytes=nbytes(state["weights"]),
        gradients_bytes=gradients,
        optimizer_bytes=nbytes(state["adamw" if optimizer == FOREACH else optimizer]),
        kept_by_role=kept,
        step_peak_bytes=max(map(nbytes, step["moments"])) + logits,
        # the foreach step holds the roots of all second moments at once
        optimizer_step_bytes={FOREACH: gradients, "adafactor": round(sizes["adafactor"])}.get(optimizer, 0),
        context_bytes=data["context_bytes"],
    )


def tiles_from(tokens: int) -> int:
    """The smallest number of sequences of so many tokens, or of so many tokens at a time, that has tiles."""
    return -(-2 * LEAST_ROWS // tokens)


def largest(needed: Callable[[int], int], room: int, most: int | None = None, falls: int | None = None) -> int:
    """The largest number from 1 to `most` whose bytes fit into `room`, 0 if none does.

    `needed` grows with the number; it may fall once, at the number `falls`.

    `needed` is asked a few times only, because it may be a slow estimate that is almost linear. So the next number is
    where the line through the last two points meets the room. Where such lines narrow the interval too slowly, as for
    bytes that grow with a square, the middle of the interval is next.
    """
    if falls is not None and (most is None or falls <= most) and needed(falls) <= room:
        return falls + largest(lambda more: needed(falls + more), room, None if most is None else most - falls)
    low, at_low = 0, 0
    high, at_high = None if most is None else most + 1, 0
    number, width, slow = 1, high, 0
    while high is None or high - low > 1:
        size = needed(number)
        if size <= room:
            slope = (size - at_low) / (number - low) if low else 0.0
            low, at_low = number, size
            number = number + max(1, int((room - size) / slope)) if slope > 0 else 2 * number
        else:
            high, at_high = number, size
            slope = (at_high - at_low) / (high - low) if low else 0.0
            number = low + int((room - at_low) / slope) if slope > 0 else (low + high) // 2
        if high is not None:
            halved = width is None or 2 * (high - low) <= width
            width, slow = (high - low, 0) if halved else (width, slow + 1)
            number = (low + high) // 2 if slow >= _SLOW else min(max(number, low + 1), high - 1)
    return low


def longest(needed: Callable[[int], int], room: int, limit: int | None, batch_size: int | None, step: int = 64) -> int:
    """The longest sequences whose bytes fit into `room`, 0 if none do: a multiple of `step`, or `limit` itself.

    With a batch size, bytes may fall where so many sequences have tiles.
    """

    def length(steps: int) -> int:
        return steps * step if limit is None else min(steps * step, limit)

    most = None if limit is None else -(-limit // step)
    falls = None if batch_size is None else tiles_from(batch_size * step)
    return length(largest(lambda steps: needed(length(steps)), room, most, falls))
