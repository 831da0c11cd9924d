"""The share of stock's kept bytes that presets save, and what keeps most of the rest: in fp32, train mode, tiny.

The loss of a model without labels is the sum of its outputs, because this loss itself keeps nothing.
"""

from __future__ import annotations

import copy
import re
import statistics
from collections import Counter
from datetime import date
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_actcompress import patch_model
from hf_actcompress.memory.measurement.allocator import kept_bytes
from hf_actcompress.memory.measurement.saved_tensors import saved_tensors, storages

from .modes import Mode
from .step import Batch, has_labels, own_loss, prepare, seed_all, tensors

if TYPE_CHECKING:
    from .pair import Row


def measure(row: Row, stock: Any, batch: Batch) -> None:
    """Fill `saved`, `saved_int8`, `stays` and `measured` of the row. Raises what the model raises."""
    row.saved, row.saved_int8 = saved(stock, batch, "exact", "int8")
    row.stays = _largest(patch_model(copy.deepcopy(stock), strict=False), batch)
    row.measured = date.today().isoformat()


def saved(stock: Any, batch: Batch, *presets: str) -> list[float]:
    """The share of the model's kept bytes that each preset saves."""
    whole = kept(stock, batch)
    ours = (patch_model(copy.deepcopy(stock), preset, strict=False) for preset in presets)
    return [round(1 - kept(model, batch) / whole, 3) for model in ours]


def kept(model: Any, batch: Batch) -> int:
    model = prepare(copy.deepcopy(model), Mode("fp32"))

    def forward() -> Tensor:
        seed_all()
        return _loss(model(**batch), batch)

    return kept_bytes(forward, "cpu")


def _loss(out: Any, batch: Batch) -> Tensor:
    """The model's own loss, or the sum of its float outputs, whose backward needs no tensor."""
    loss = own_loss(out) if has_labels(batch) else None
    if loss is not None:
        return loss
    parts = [x for _, x in tensors(out) if x.is_floating_point() and x.requires_grad]
    return torch.stack([x.sum().float() for x in parts]).sum()


def _largest(model: Any, batch: Batch) -> str:
    """The module that keeps most (with layer numbers as *), and its share of all that is kept."""
    seed_all()
    given = (x for x in batch.values() if isinstance(x, torch.Tensor))
    seen = saved_tensors(model, lambda: model(**batch), lambda out: _loss(out, batch), storages(given))
    sizes: dict[str, int] = {}
    for tensor in seen.tensors:
        name = re.sub(r"\.\d+(?=\.|$)", ".*", f".{tensor.module}").lstrip(".")
        sizes[name] = sizes.get(name, 0) + tensor.nbytes
    if not sizes:
        return ""
    name = max(sizes, key=sizes.__getitem__)
    return f"{name or 'the model'} {sizes[name] / seen.total:.0%}"


def by_type(rows: list[Row]) -> dict[str, Row]:
    """For each type, the row in which exact saves most. A class without a head keeps little but its layers' tensors."""
    best: dict[str, Row] = {}
    for row in rows:
        whole = row.saved is not None and row.saved_int8 is not None and not row.flag
        if whole and (row.type not in best or row.saved > best[row.type].saved):
            best[row.type] = row
    return best


def summary(rows: list[Row]) -> list[str]:
    """Lines of the sweep's summary."""
    pairs = [row for row in rows if row.saved is not None and row.saved_int8 is not None]
    best = list(by_type(pairs).values())
    if not best:
        return []
    lines = ["", "| kept bytes saved, fp32, tiny | exact | int8 |", "|---|---|---|"]
    groups = [("median over types, the class that saves most", best)]
    if len(pairs) > len(best):
        groups.insert(0, (f"median over {len(pairs)} pairs", pairs))
    for name, some in groups:
        lines.append(
            f"| {name} | {statistics.median(row.saved for row in some):.0%} "
            f"| {statistics.median(row.saved_int8 for row in some):.0%} |"
        )
    for limit in (0.25, 0.1, 0.0):
        low = [sum(getattr(row, name) < limit for row in best) for name in ("saved", "saved_int8")]
        lines.append(f"| types below {limit:.0%}, of {len(best)} | {low[0]} | {low[1]} |")
    days = Counter(row.measured or "an earlier day" for row in best)
    return [*lines, "", f"Measured: {', '.join(f'{n} types on {day}' for day, n in sorted(days.items()))}."]


def table(rows: list[Row]) -> str:
    """`savings.md`: a line for each type."""
    lines = [
        "# Kept bytes saved, by model type",
        "",
        "Tiny models in fp32, of each type the class that saves most, without dropout where nothing else is said:",
        "`python -m tests.sweep --flags no --modes fp32`, or the whole sweep. Of models without labels what the",
        "model keeps is counted, and nothing of the sweep's own loss. A layer with a plain activation has to keep",
        "queries, keys, values, attention's output, two norms' inputs and the pre-activation: 7.5 of the 11 tensors of",
        "the hidden size that stock keeps where the MLP is 1.5 times as wide, as here. That is 32% less; a head with",
        "its loss adds to it.",
        *summary(rows),
    ]
    lines += ["", "| type | class | exact | exact, dropout 0.1 | int8 | largest that stays |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in sorted(by_type(rows).values(), key=lambda row: row.type):
        dropped, int8 = ("" if share is None else f"{share:.0%}" for share in (row.saved_dropout, row.saved_int8))
        lines.append(f"| {row.type} | {row.model} | {row.saved:.0%} | {dropped} | {int8} | {row.stays} |")
    return "\n".join(lines) + "\n"
