"""The result of `plan`, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from ...config import CUSTOM, CompressionConfig, preset_of
from ...display.pictures import Target, new_figure, save
from ...display.report import Report
from ...display.tables import Table
from ...quick.sizes import readable_size
from ..estimation.result import Estimate
from .options import MEANINGS


@dataclass(frozen=True)
class PlanRow:
    """How one layer is kept.

    Args:
        layer: The layer's name in the model.
        option: "exact", "checkpoint", or how norm, MLP and attention tensors are stored ("int8", "exact/int8/exact").
            `plan` lists all.
        kept_bytes: Bytes that the layer keeps for backward.
        time: Expected extra time, as a fraction of the layer's own forward and backward.
        error: Relative error of the stored tensors, averaged over norm, MLP and attention.
    """

    layer: str
    option: str
    kept_bytes: int
    time: float
    error: float


@dataclass(frozen=True)
class Plan(Report):
    """How to keep each layer so that training fits a budget. Pass it to `patch_model`; it prints, serialises, draws.

    Args:
        budget_bytes: Bytes that the device has.
        objective: "speed" or "fidelity".
        rows: One row per layer.
        config: The config that `patch_model` applies.
        estimate: The estimate of the model under this config, with every layer as planned.
        exact_time: Of a lossy plan: the `time` of the fastest exact plan that fits; None if none does.
    """

    budget_bytes: int
    objective: str
    rows: tuple[PlanRow, ...]
    config: CompressionConfig
    estimate: Estimate
    exact_time: float | None = None

    @property
    def time(self) -> float:
        """Expected extra time of the layers' forward and backward, as a fraction."""
        return sum(row.time for row in self.rows) / len(self.rows)

    @property
    def error(self) -> float:
        """Relative error of what is stored, averaged over the layers; 0 means that gradients are exact."""
        return sum(row.error for row in self.rows) / len(self.rows)

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
        lines = [f"needs {needed} of {room}; expected extra time of the layers {self.time:.1%}; {self._gradients()}"]
        lines += [f"{names}: {option}, keep {readable_size(size)}" for names, option, size in self.groups()]
        return "\n".join([*lines, *self._meanings()])

    def _meanings(self) -> Iterator[str]:
        """What the words of the table mean, and what holds for the whole model."""
        options = list(dict.fromkeys(row.option for row in self.rows))
        several = [option for option in options if "/" in option]
        for name in dict.fromkeys(part for option in options for part in option.split("/")):
            yield f"{name}: {MEANINGS[name]}"
        if several:
            yield f"{', '.join(several)}: norm, MLP and attention tensors, in this order, each in its own way"
        if self.config.always_in_tiles:
            yield "all layers: MLPs are computed in tiles of rows, and again in backward"

    @property
    def preset(self) -> str | None:
        """The preset whose config this is; None if it is that of no preset."""
        return known if (known := preset_of(self.config)) != CUSTOM else None

    def _gradients(self) -> str:
        """Whether gradients are exact; if not, what that saves."""
        if not self.error:
            return "gradients exact"
        saved = "no exact plan fits"
        if self.exact_time is not None:
            saved = f"saves {self.exact_time - self.time:.1%} beside the fastest exact plan ({self.exact_time:.1%})"
        return f"stored tensors off by {self.error:.2%}; {saved}"

    def tables(self) -> tuple[Table, ...]:
        """How the layers are kept; neighbours that are kept alike share a row."""
        rows = [(names, option, readable_size(size)) for names, option, size in self.groups()]
        return (Table(("layers", "kept as", "kept"), rows, ("kept",), "plan"),)

    def summary(self) -> str:
        """The first line and what the words mean; the other lines repeat what the table says."""
        return "\n".join([str(self).splitlines()[0], *self._meanings()])

    def plot(self, target: Target) -> None:
        """One bar per layer: its height is what the layer keeps, its colour says how. See `Report.plot`."""
        figure = new_figure("Plan.plot", figsize=(9, 3))
        axes = figure.subplots()
        for option in dict.fromkeys(row.option for row in self.rows):
            places = [i for i, row in enumerate(self.rows) if row.option == option]
            axes.bar(places, [self.rows[i].kept_bytes / 2**20 for i in places], label=option)
        axes.set_xlabel("layer")
        axes.set_ylabel("MiB kept for backward")
        figure.legend(loc="outside right upper")
        save(figure, target)
