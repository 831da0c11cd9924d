"""The contents of a memory report, and how it is shown."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...display.pictures import Target, draw_roles
from ...display.report import Report
from ...display.tables import Table
from ...quick.sizes import readable_size

_SIDES = ("stock", "patched")


@dataclass(frozen=True)
class MemoryRow:
    """What one module keeps for backward.

    Args:
        module: Its name; "" is the model itself.
        role: linear, norm, activation, mlp, attention, dropout, adapter, embedding, loss, checkpoint or other.
        stock_bytes, patched_bytes: Bytes of the storages that are first saved while it runs, and none of its children.
        stock_tensors, patched_tensors: Dtype and shape of each.
    """

    module: str
    role: str
    stock_bytes: int
    patched_bytes: int
    stock_tensors: tuple[str, ...] = ()
    patched_tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Advice:
    """Something that the user can still turn off, in the state in which the model was reported.

    Args:
        what: What is kept or held.
        bytes: Measured on this model and batch.
        how: What to change.
    """

    what: str
    bytes: int
    how: str


@dataclass(frozen=True)
class MemoryReport(Report):
    """What is kept for backward, stock beside patched. It prints with rich, serialises, and draws with matplotlib.

    Args:
        rows: One per module and role that keeps anything.
        advice: What can still be turned off, largest first.
        notes: What limits the figures.
        layer_tokens: Tokens of the batch summed over the layers: the divisor of the figures per token and layer.
        hidden_size: Width of the layers, 0 if unknown.
    """

    rows: tuple[MemoryRow, ...]
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]
    layer_tokens: int
    hidden_size: int
    layer_stock_bytes: int
    layer_patched_bytes: int

    @property
    def stock_bytes(self) -> int:
        return sum(row.stock_bytes for row in self.rows)

    @property
    def patched_bytes(self) -> int:
        return sum(row.patched_bytes for row in self.rows)

    @property
    def stock_per_token_layer(self) -> float:
        """Bytes per token and layer, of what the layers keep."""
        return self.layer_stock_bytes / max(1, self.layer_tokens)

    @property
    def patched_per_token_layer(self) -> float:
        """Bytes per token and layer, of what the layers keep."""
        return self.layer_patched_bytes / max(1, self.layer_tokens)

    def by_role(self) -> dict[str, tuple[int, int]]:
        """Bytes per role, stock and patched, the largest in stock first."""
        return _totals((row.role, row) for row in self.rows)

    def derived(self) -> dict[str, Any]:
        """The totals, and what the layers keep per token."""
        return {
            "stock_bytes": self.stock_bytes,
            "patched_bytes": self.patched_bytes,
            "stock_bytes_per_token_and_layer": self.stock_per_token_layer,
            "patched_bytes_per_token_and_layer": self.patched_per_token_layer,
        }

    def __str__(self) -> str:
        lines = [
            f"kept for backward: {readable_size(self.stock_bytes)} stock, {readable_size(self.patched_bytes)} patched"
        ]
        if self.layer_tokens:
            lines.append(f"per token and layer: {self._per_layer()}")
        lines += [f"still to turn off, {readable_size(row.bytes)}: {row.what}; {row.how}" for row in self.advice]
        return "\n".join([*lines, *self.notes])

    def _per_layer(self) -> str:
        stock, patched = self.stock_per_token_layer, self.patched_per_token_layer
        text = f"{stock:,.0f} bytes stock, {patched:,.0f} patched"
        if self.hidden_size:
            text += (
                f" ({stock / self.hidden_size:.2f} h and {patched / self.hidden_size:.2f} h, h = {self.hidden_size})"
            )
        return text

    def tables(self) -> tuple[Table, ...]:
        """Bytes by module and role, the layers summed up."""
        totals = _totals(((re.sub(r"\.\d+(?=\.|$)", ".*", row.module), row.role), row) for row in self.rows)
        rows = [
            (module or "(model)", role, readable_size(stock), readable_size(patched))
            for (module, role), (stock, patched) in totals.items()
        ]
        total = ("total", "", readable_size(self.stock_bytes), readable_size(self.patched_bytes))
        return (Table(("module", "role", *_SIDES), rows, _SIDES, "kept for backward", total),)

    def plot(self, target: Target) -> None:
        """Bars per role, stock above patched. See `Report.plot`."""
        bars = {
            name: {role: sizes[index] for role, sizes in self.by_role().items()} for index, name in enumerate(_SIDES)
        }
        draw_roles(bars, target)


def _totals(keyed: Iterable[tuple[Any, MemoryRow]]) -> dict[Any, tuple[int, int]]:
    """Stock and patched bytes summed by key, the largest in stock first."""
    sums: dict[Any, list[int]] = defaultdict(lambda: [0, 0])
    for key, row in keyed:
        sums[key][0] += row.stock_bytes
        sums[key][1] += row.patched_bytes
    ordered = sorted(sums.items(), key=lambda item: (-item[1][0], -item[1][1]))
    return {key: (stock, patched) for key, (stock, patched) in ordered}
