"""From how many tokens per step a patched layer costs no time: computed from host times, not measured on a GPU.

A GPU waits for its host where its own work for a layer takes less time than the host needs for that layer. Its work is
taken as 6 FLOPs per parameter and token at a share of its peak. Its other work (attention, elementwise) only lowers the
number of tokens. The number rises because a launch on CUDA takes the host longer than a tiny op on the CPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from .bench_models import FAMILIES, SHAPES

# TFLOP/s of dense bf16 products
PEAKS = {"RTX 4090": 165, "A100": 312, "H100": 989}
COLUMNS = ("model", "parameters per layer", "host", "exact, host us", "x stock", *PEAKS)
FIRST = "from the first token"


def tokens(microseconds: float, parameters: int, peak: float, utilisation: float) -> float:
    """The tokens at which the device computes a layer for as long as the host needs for it; `peak` in TFLOP/s."""
    return microseconds * 1e-6 * utilisation * peak * 1e12 / (6 * parameters)


def layer_parameters(name: str) -> int:
    family, shape = SHAPES[name]
    with torch.device("meta"):
        few, more = (FAMILIES[family](replace(shape, layers=n), 512) for n in (1, 2))
    return sum(p.numel() for p in more.parameters()) - sum(p.numel() for p in few.parameters())


def table(records: Sequence[dict[str, Any]], utilisation: float) -> str:
    """The tokens by GPU, a line for each published shape and each record that host_time.py has written."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for name in SHAPES:
        if SHAPES[name][0] in FAMILIES:
            lines += (f"| {' | '.join(cells)} |" for cells in _rows(name, records, utilisation))
    return "\n".join(lines) + "\n"


def _rows(name: str, records: Sequence[dict[str, Any]], utilisation: float) -> Iterator[list[str]]:
    parameters = layer_parameters(name)
    for record in records:
        host = f"{record['device']}, dropout {record['options']['dropout']}"
        for row in record["rows"]:
            if (row["model"], row["mode"]) != (SHAPES[name][0], "exact"):
                continue
            time, ratio = statistics.median(row["microseconds"]), statistics.median(row["ratios"])
            reached = [tokens(time, parameters, peak, utilisation) for peak in PEAKS.values()]
            answers = [FIRST if ratio <= 1 else f"{found:,.0f}" for found in reached]
            size = f"{parameters / 1e6:.1f} M"
            yield [name.removesuffix("-4layers"), size, host, f"{time:.0f}", f"{ratio:.2f}", *answers]
