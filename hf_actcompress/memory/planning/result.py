"""What a plan holds, and how it is shown."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ...config import CompressionConfig
from ..estimating.result import Estimate
from ..pictures import new_figure
from ..report import readable_size

if TYPE_CHECKING:
    from os import PathLike


@dataclass(frozen=True)
class PlanRow:
    """What becomes of one layer.

    Args:
        layer: Its name.
        option: "exact", "checkpoint", or how norm, MLP and attention tensors are stored ("int8", "exact/int8/exact").
        kept_bytes: What it keeps for backward.
        time: Expected extra time, as a fraction of the layer's own forward and backward.
        error: Relative error of the stored tensors, averaged over norm, MLP and attention.
    """

    layer: str
    option: str
    kept_bytes: int
    time: float
    error: float


@dataclass(frozen=True)
class Plan:
    """How to keep each layer so that training fits a budget. `patch_model` takes it; prints, serialises, draws.

    Args:
        budget_bytes: What the device has.
        objective: "speed" or "fidelity".
        rows: One per layer.
        config: What `patch_model` does with it.
        estimate: Of the model under this config, all layers as planned.
    """

    budget_bytes: int
    objective: str
    rows: tuple[PlanRow, ...]
    config: CompressionConfig
    estimate: Estimate

    @property
    def time(self) -> float:
        """Expected extra time of the layers' forward and backward, as a fraction."""
        return sum(row.time for row in self.rows) / len(self.rows)

    @property
    def error(self) -> float:
        """Relative error of what is stored, averaged over the layers; 0: gradients are exact."""
        return sum(row.error for row in self.rows) / len(self.rows)

    def to_json(self) -> str:
        """Everything; `from_json` reads it."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote."""
        data = json.loads(text)
        config = {**data["config"], "overrides": tuple(map(tuple, data["config"]["overrides"]))}
        config["checkpoint"] = tuple(config["checkpoint"])
        estimate = {**data["estimate"], "notes": tuple(data["estimate"]["notes"])}
        return cls(
            budget_bytes=data["budget_bytes"],
            objective=data["objective"],
            rows=tuple(PlanRow(**row) for row in data["rows"]),
            config=CompressionConfig(**config),
            estimate=Estimate(**_known(Estimate, estimate)),
        )

    def groups(self) -> tuple[tuple[str, str, int], ...]:
        """Neighbouring layers that are kept in the same way: (layers, option, bytes)."""
        found = []
        for option, group in groupby(self.rows, key=lambda row: row.option):
            rows = list(group)
            names = rows[0].layer if len(rows) == 1 else f"{rows[0].layer} .. {rows[-1].layer.rpartition('.')[2]}"
            found.append((names, option, sum(row.kept_bytes for row in rows)))
        return tuple(found)

    def __str__(self) -> str:
        needed, room = readable_size(self.estimate.device_bytes), readable_size(self.budget_bytes)
        gradients = f"stored tensors off by {self.error:.2%}" if self.error else "gradients exact"
        lines = [f"needs {needed} of {room}; expected extra time of the layers {self.time:.0%}; {gradients}"]
        lines += [f"{names}: {option}, keep {readable_size(size)}" for names, option, size in self.groups()]
        return "\n".join(lines)

    def print(self) -> None:
        """A table of the layers on the console; plain text where the output is no terminal."""
        from rich.box import ASCII2, ROUNDED
        from rich.console import Console
        from rich.table import Table

        terminal = Console().is_terminal
        console = Console() if terminal else Console(width=120)
        table = Table("layers", "kept as", box=ROUNDED if terminal else ASCII2, title="plan")
        table.add_column("kept", justify="right")
        for names, option, size in self.groups():
            table.add_row(names, option, readable_size(size))
        console.print(table)
        console.print(str(self).splitlines()[0], markup=False, highlight=False, soft_wrap=True)

    def plot(self, path: str | PathLike[str]) -> None:
        """A bar per layer, its height what the layer keeps, its colour how.

        Args:
            path: Where to write; the suffix decides the format (png, svg, pdf).

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        figure = new_figure("Plan.plot", figsize=(9, 3))
        axes = figure.subplots()
        for option in dict.fromkeys(row.option for row in self.rows):
            places = [i for i, row in enumerate(self.rows) if row.option == option]
            axes.bar(places, [self.rows[i].kept_bytes / 2**20 for i in places], label=option)
        axes.set_xlabel("layer")
        axes.set_ylabel("MiB kept for backward")
        figure.legend(loc="outside right upper")
        figure.savefig(path)


def _known(kind: type, data: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in data.items() if name in names}
