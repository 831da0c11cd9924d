"""What each part of the fallback saves beside plans of layers: kept bytes with that part switched off, type by type.

    python -m tests.sweep.fallback --sample 64 --seed 1    # of the types of results/savings.md; some 30 s a type

It writes `results/fallback.jsonl`, to which a further run adds, and `results/fallback.md`.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hf_actcompress import patch_model
from hf_actcompress.models import root, rules

from . import savings
from .batches import NOTES, find_batch, with_labels
from .catalogue import Pair, catalogue
from .pair import Subject, refused
from .step import Batch

RESULTS = Path(__file__).parent / "results"
LEAVES = ("find_leaf", "find_rms_norm", "find_gated_mlp", "find_tiled_mlp")


def _without(*names: str) -> Any:
    return patch.object(rules, "RULES", tuple(rule for rule in rules.RULES if rule.__name__ not in names))


# what is switched off -> how
PARTS: dict[str, Callable[[], list[Any]]] = {
    "attention": lambda: [_without("find_attention")],
    "leaves": lambda: [_without(*LEAVES)],
    "net": lambda: [patch.object(root, "netted", lambda *_: nullcontext())],
    "all": lambda: [_without(*LEAVES, "find_attention")],
}


def measured(pair: Pair) -> dict[str, float]:
    """The share of stock's kept bytes that `exact` keeps: with everything ("full"), and without each part."""
    stock = Subject(pair, {}).build()
    plain = find_batch(stock, pair.type, pair.task)
    batch = with_labels(stock, plain, pair.task)
    for given in (plain, batch):
        for note in (*NOTES, "text alone"):
            given.pop(note, None)
    if batch is not plain and refused(stock, batch):
        batch = plain
    whole = savings.kept(stock, batch)
    return {name: round(_kept(stock, batch, off()) / whole, 4) for name, off in (("full", list), *PARTS.items())}


def _kept(stock: Any, batch: Batch, switches: list[Any]) -> int:
    with ExitStack() as stack:
        for switch in switches:
            stack.enter_context(switch)
        return savings.kept(patch_model(copy.deepcopy(stock), "exact", strict=False), batch)


def chosen(sample: int, seed: int) -> list[Pair]:
    """Types of `savings.md` at random, each with the class that is listed there."""
    known = {(pair.type, pair.model): pair for pair in catalogue()}
    lines = (line.split("|") for line in (RESULTS / "savings.md").read_text().splitlines() if line.startswith("| "))
    listed = ((cells[1].strip(), cells[2].strip()) for cells in lines)
    pairs = [known[key] for key in listed if key in known]
    random.Random(seed).shuffle(pairs)
    return pairs[:sample]


def table(rows: list[dict[str, Any]]) -> str:
    """`fallback.md`: how many types each part matters to, and the types to which one matters."""
    return "\n".join([*_totals(rows), "", *_by_type(rows), ""])


def _lost(row: dict[str, Any], name: str) -> float:
    return 100 * float(row["kept"][name] - row["kept"]["full"])


def _totals(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "# What the fallback saves beside plans"
    yield ""
    yield f"{len(rows)} types at random, tiny models in fp32: points of stock's kept bytes that `exact` keeps more"
    yield "without a part of the fallback (`python -m tests.sweep.fallback`, whose table says what each part is)."
    yield ""
    yield "| without | mean, points | types that lose over 1 point | over 5 points |"
    yield "|---|---|---|---|"
    for name in PARTS:
        lost = [_lost(row, name) for row in rows]
        yield f"| {name} | {sum(lost) / len(lost):.1f} | {sum(x > 1 for x in lost)} | {sum(x > 5 for x in lost)} |"


def _by_type(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield f"| class | kept | {' | '.join(PARTS)} |"
    yield "|---" * (len(PARTS) + 2) + "|"
    for row in sorted(rows, key=lambda row: -max(_lost(row, name) for name in PARTS)):
        if max(_lost(row, name) for name in PARTS) > 1:
            cells = " | ".join(f"{_lost(row, name):.1f}" for name in PARTS)
            yield f"| {row['class']} | {row['kept']['full']:.0%} | {cells} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=64, help="how many types; 0: the table alone")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    path = RESULTS / "fallback.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for pair in chosen(args.sample, args.seed):
        if all(row["class"] != pair.model for row in rows):
            rows.append({"type": pair.type, "class": pair.model, "kept": measured(pair)})
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (RESULTS / "fallback.md").write_text(table(rows))


if __name__ == "__main__":
    main()
