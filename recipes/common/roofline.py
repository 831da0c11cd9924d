"""Where a kernel for a weight gradient from stored data must be faster: the least time of each way, by a roofline.

A linear of D features and O outputs has kept something of its input x [N, D], and dW [O, D] = dy^T x is wanted. Ways:

- "dense": a pass that unpacks x, and torch's dense product.
- "torch": what torch can do without a dense x: a pass over dy (its rows are gathered, or pooled), and a product of
  fewer rows. There is no such way for codes.
- "kernel": one product that decodes, gathers or pools as it reads.

Each launch takes as long as its bytes at the memory's speed, or as its operations at the speed of dense 16-bit
products, whichever is longer. A tensor that a product reads several times is read from memory once, except rows of dy
that belong to kept tiles: each column of tiles has its own rows, and dy is larger than a cache. A kernel reaches a
share of the speed of torch's product. `needed_rate` is the share from which on it is faster, and it "must win" if it is
faster at `RATE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# the share of torch's speed that Triton's products reach, by their authors' figures; nobody has measured it here
RATE = 0.8
ELEMENT = 2


class Card(NamedTuple):
    """Bytes per second of the memory, and operations per second of dense 16-bit products with fp32 sums."""

    bandwidth: float
    flops: float


# from data sheets; the H100 is the SXM version, and the A100 has 80 GB
CARDS = {
    "T4": Card(320e9, 65e12),
    "RTX 4090": Card(1008e9, 165.2e12),
    "A100": Card(2039e9, 312e12),
    "H100": Card(3350e9, 989e12),
    "H200": Card(4800e9, 989e12),
}


class Shape(NamedTuple):
    """Tokens, features and outputs of a linear."""

    tokens: int
    features: int
    outputs: int


@dataclass(frozen=True)
class Form:
    """How x is stored.

    Attributes:
        share: The share of x's elements (rows, tiles, means) that are kept; 1 for codes.
        bytes: Bytes of each kept element.
        tile: Features of a kept tile; 0 if no tiles are kept.
        pooled: Whether dy is pooled instead of gathered.
    """

    share: float
    bytes: float = ELEMENT
    tile: int = 0
    pooled: bool = False


FORMS = {
    "int8": Form(1.0, 1 + 4 / 64),
    "int4": Form(1.0, 0.5 + 4 / 64),
    "int2": Form(1.0, 0.25 + 4 / 64),
    "fp8": Form(1.0, 1 + 2 / 128),
    **{f"rows, {share}": Form(share) for share in (0.5, 0.3, 0.1)},
    **{f"tiles 32 x 32, {share}": Form(share, tile=32) for share in (0.5, 0.3, 0.1)},
    **{f"means of {window}": Form(1 / window, pooled=True) for window in (2, 4)},
}


class Launch(NamedTuple):
    """The bytes that a launch moves, the operations of its product, and whether it is torch's own kernel."""

    bytes: float
    operations: float = 0.0
    ours: bool = False


def launches(form: Form, shape: Shape) -> dict[str, list[Launch]]:
    """The launches of each way."""
    (rows, features, outputs), kept = shape, form.share * shape.tokens
    x, dy, dw = rows * features * ELEMENT, rows * outputs * ELEMENT, features * outputs * ELEMENT
    stored, operations = form.share * rows * features * form.bytes, 2.0 * kept * features * outputs
    ways = {"dense": [Launch(stored + x), Launch(x + dy + dw, 2.0 * rows * features * outputs)]}
    columns = features / form.tile if form.tile else 1
    read = dy if form.pooled else form.share * columns * dy
    if form.share < 1:
        made = form.share * columns * dy
        ways["torch"] = [Launch(read + made), Launch(stored + made + dw, operations)]
    ways["kernel"] = [Launch(stored + read + dw, operations, ours=True)]
    return ways


def seconds(work: Sequence[Launch], card: Card, rate: float = 1.0) -> float:
    """The least time of launches that run one after the other; our products run at `rate` times torch's speed."""
    return sum(max(w.bytes / card.bandwidth, w.operations / card.flops / (rate if w.ours else 1)) for w in work)


def needed_rate(form: Form, shape: Shape, card: Card, way: str = "dense") -> float:
    """The share of torch's speed from which on the kernel is faster than another way; inf if it never is."""
    ways = launches(form, shape)
    limit, (kernel,) = seconds(ways[way], card), ways["kernel"]
    return kernel.operations / card.flops / limit if kernel.bytes / card.bandwidth < limit else float("inf")


def must_win(form: Form, shape: Shape, card: Card, rate: float = RATE) -> bool:
    """Whether the kernel is faster than unpacking and a dense product."""
    ways = launches(form, shape)
    return seconds(ways["kernel"], card, rate) < seconds(ways["dense"], card)


def markdown(shapes: dict[str, Shape]) -> str:
    """The table: a line per stored form and linear, with each card."""
    lines = [
        "The share of the speed of torch's products that a kernel has to reach to be faster than unpacking and a dense "
        f"product, in bold where {RATE} is enough / to be faster than torch's product of fewer rows. No: at no speed, "
        "if no cache helps. The formulas are in `recipes/common/roofline.py`.",
        "",
        f"| stored | linear | N, D, O | {' | '.join(CARDS)} |",
        "|---" * (3 + len(CARDS)) + "|",
    ]
    for name, form in FORMS.items():
        for linear, shape in shapes.items():
            cells = [_cell(form, shape, card) for card in CARDS.values()]
            lines.append(f"| {' | '.join([name, linear, ', '.join(map(str, shape)), *cells])} |")
    return "\n".join([*lines, ""])


def _cell(form: Form, shape: Shape, card: Card) -> str:
    ways = [way for way in launches(form, shape) if way != "kernel"]
    rates = [needed_rate(form, shape, card, way) for way in ways]
    dense, *others = ("no" if rate == float("inf") else f"{rate:.2f}" for rate in rates)
    return " / ".join([f"**{dense}**" if must_win(form, shape, card) else dense, *others])
