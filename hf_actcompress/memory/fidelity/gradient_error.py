"""What a lossy preset costs: its gradient against the exact one, on the user's own model and batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...config import PRESETS, CompressionConfig, preset_of, resolve
from ...display.pictures import Target, new_figure, save
from ...display.report import Report
from ...display.tables import Table
from ...models.root import root_of
from ...patching import patch_model, unpatch_model
from ..measurement.allocator import kept_bytes, loss_of
from ..measurement.restore import forked_generators, patch_restored, training_forward

_Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class ParameterFidelity:
    """One parameter's gradient against the exact one.

    Args:
        name: The parameter's name.
        cosine: Cosine of the angle between the two, mean over seeds.
        relative_error: ``|g - exact| / |exact|``, mean over seeds.
        bias: ``|mean(g) - exact| / |exact|``: the error that does not average out over the seeds.
    """

    name: str
    cosine: float
    relative_error: float
    bias: float


@dataclass(frozen=True)
class FidelityReport(Report):
    """A preset's gradient error beside the bytes that it keeps. It prints and serialises.

    Args:
        preset: Name of the preset, or "custom".
        parameters: One row per trainable parameter.
        cosine, relative_error, bias: Over all parameters as one vector.
        kept_bytes, stock_bytes: Bytes kept for backward with the preset and by the stock model, as the allocator
            counts them.
        seeds: How many draws of the stochastic codecs were averaged.
    """

    preset: str
    parameters: tuple[ParameterFidelity, ...]
    cosine: float
    relative_error: float
    bias: float
    kept_bytes: int
    stock_bytes: int
    seeds: int

    def figures(self) -> tuple[str, str, str]:
        """Error, cosine and bias as texts."""
        return f"{self.relative_error:.3%}", f"{self.cosine:.6f}", f"{self.bias:.3%}"

    def __str__(self) -> str:
        error, cosine, bias = self.figures()
        kept = f"keeps {self.kept_bytes:,} bytes, {self.kept_bytes / self.stock_bytes:.3f} of stock"
        return f"{self.preset}: gradient error {error}, cosine {cosine}, bias {bias} over {self.seeds} seeds; {kept}"

    def tables(self, worst: int = 12) -> tuple[Table, ...]:
        """The parameters with the largest errors."""
        numbers = ("cosine", "relative error", "bias")
        rows = [
            (row.name, f"{row.cosine:.6f}", f"{row.relative_error:.3%}", f"{row.bias:.3%}")
            for row in sorted(self.parameters, key=lambda row: -row.relative_error)[:worst]
        ]
        return (Table(("parameter", *numbers), rows, numbers),)


@dataclass(frozen=True)
class FidelityComparison(Report):
    """The reports of several presets on one model and batch."""

    reports: tuple[FidelityReport, ...]

    def tables(self) -> tuple[Table, ...]:
        """A row per preset. Each table has `to_csv()`, `to_markdown()` and `to_latex()`."""
        numbers = ("kept, share of stock", "gradient error", "cosine", "bias")
        rows = [(row.preset, f"{row.kept_bytes / row.stock_bytes:.3f}", *row.figures()) for row in self.reports]
        return (Table(("preset", *numbers), rows, numbers),)

    def __str__(self) -> str:
        return "\n".join(map(str, self.reports))

    def plot(self, target: Target) -> None:
        """Gradient error against kept bytes, one point per preset. See `Report.plot`."""
        figure = new_figure("FidelityComparison.plot", figsize=(7, 4.5))
        axes = figure.add_subplot()
        for report in self.reports:
            # a log axis has no zero: a preset without any error is drawn at the bottom
            x, y = report.kept_bytes / report.stock_bytes, max(report.relative_error, 1e-8)
            axes.plot(x, y, "o")
            axes.annotate(report.preset, (x, y), textcoords="offset points", xytext=(5, 3))
        axes.set(yscale="log", xlim=(0, 1.05), xlabel="kept bytes, share of stock", ylabel="relative gradient error")
        axes.grid(alpha=0.3)
        save(figure, target)


def fidelity_report(
    model: nn.Module, batch: Mapping[str, Any], config: CompressionConfig | str | None = None, *, seeds: int = 4
) -> FidelityReport:
    """Gradient of the patched model against the exact one, on one batch, without training.

    Dropout draws the same masks in both, so every difference is an error of the preset. Afterwards the model's patch,
    modes, gradients, buffers and the generators are as before. With `gradient_norms` the batch runs once before it is
    measured, so that its norms are known: the error is that of a later epoch in the best case, because no weight has
    changed in between. With `refresh_bits` the bits are those that this batch gives.

    Args:
        model: Stock or patched, on the device where it trains.
        batch: Keyword arguments of the forward, with labels.
        config: The preset to look at; by default what the model is patched with, "exact" for a stock model.
        seeds: Draws of stochastic codecs to average over; a deterministic preset needs one.

    Returns:
        Cosine, relative error and bias, per parameter and overall, and the kept bytes.

    Raises:
        MeasurementError: The forward returned no loss.
        UnknownOptionError: Unknown preset.
        ValueError: ``seeds`` below 1.
    """
    if seeds < 1:
        raise ValueError(f"seeds has to be 1 or more, got {seeds}")
    root = root_of(model)
    asked = resolve(config) if config is not None else root.config if root is not None else resolve("exact")
    inputs = dict(batch)
    with patch_restored(model), training_forward(model):
        unpatch_model(model)
        exact = gradients(model, inputs)
        stock_bytes = _kept(model, inputs)
        draws = []
        for seed in range(seeds):
            unpatch_model(model)
            patch_model(model, asked, strict=False, seed=seed)
            patched_root = root_of(model)
            if asked.refresh_bits and patched_root is not None:
                patched_root.measure_bits_next()
            if asked.gradient_norms or asked.refresh_bits:
                # as in a later epoch: the samples are known, with gradient norms of exactly these weights
                gradients(model, inputs)
            draws.append(gradients(model, inputs))
        kept = _kept(model, inputs)
    rows = tuple(_compare(name, [[draw[name]] for draw in draws], [exact[name]]) for name in exact)
    total = _compare("", [list(draw.values()) for draw in draws], list(exact.values()))
    name = preset_of(asked)
    return FidelityReport(name, rows, total.cosine, total.relative_error, total.bias, kept, stock_bytes, seeds)


def compare_presets(
    model: nn.Module,
    batch: Mapping[str, Any],
    presets: Iterable[str] | Mapping[str, CompressionConfig | str] | None = None,
    *,
    seeds: int = 4,
) -> FidelityComparison:
    """`fidelity_report` of several presets, by default all, for one picture of error against bytes.

    Args:
        model, batch, seeds: As for `fidelity_report`.
        presets: Names of presets, or configs under names of one's own.

    Raises:
        ActCompressError: One of the errors of `fidelity_report`.
    """
    names = PRESETS if presets is None else presets
    configs = names if isinstance(names, Mapping) else {name: name for name in names}
    found = ((name, fidelity_report(model, batch, config, seeds=seeds)) for name, config in configs.items())
    return FidelityComparison(tuple(replace(report, preset=name) for name, report in found))


def gradients(model: nn.Module, inputs: dict[str, Any]) -> _Gradients:
    """Gradients by parameter name. `.grad` is not touched; the generators are restored, so all calls draw the same."""
    return loss_and_gradients(model, inputs)[1]


def loss_and_gradients(
    model: nn.Module, inputs: Mapping[str, Any], autocast: AbstractContextManager[Any] | None = None
) -> tuple[Tensor, _Gradients]:
    """The same, and the loss before them; the forward runs under `autocast` if that is given."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with forked_generators(model):
        with autocast or nullcontext():
            loss = loss_of(model(**inputs))
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return loss.detach(), {name: g.detach() for name, g in zip(parameters, found, strict=True) if g is not None}


def _kept(model: nn.Module, inputs: dict[str, Any]) -> int:
    with forked_generators(model):
        return kept_bytes(lambda: model(**inputs), next(model.parameters()).device)


def _compare(name: str, draws: list[list[Tensor]], exact: list[Tensor]) -> ParameterFidelity:
    """Statistics of some tensors, taken as one vector, in fp64."""
    reference = [g.double() for g in exact]
    norm = _norm(reference)
    cosines, errors = [], []
    mean = [torch.zeros_like(g) for g in reference]
    for draw in draws:
        wide = [g.double() for g in draw]
        dot = sum(float((g * r).sum()) for g, r in zip(wide, reference, strict=True))
        cosines.append(dot / max(norm * _norm(wide), 1e-300))
        errors.append(_norm([g - r for g, r in zip(wide, reference, strict=True)]) / max(norm, 1e-300))
        for total, g in zip(mean, wide, strict=True):
            total += g / len(draws)
    bias = _norm([m - r for m, r in zip(mean, reference, strict=True)]) / max(norm, 1e-300)
    return ParameterFidelity(name, sum(cosines) / len(cosines), sum(errors) / len(errors), bias)


def relative_error(found: _Gradients, exact: _Gradients) -> float:
    """``|found - exact| / |exact|``, all parameters as one vector, in fp64."""
    off = sum(float((found[name].double() - x.double()).square().sum()) for name, x in exact.items())
    return math.sqrt(off) / max(_norm(x.double() for x in exact.values()), 1e-300)


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(t.square().sum()) for t in tensors))
