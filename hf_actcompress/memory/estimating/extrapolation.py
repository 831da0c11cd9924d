"""From two or three layers to all of them, exactly: every further layer of a run adds the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from ...config import CompressionConfig
from .layers import LayerRun, find_runs, shortened
from .step import FakeStep

# the first layer differs where nothing before it needs a gradient (LoRA), so one layer says nothing about the others
_FEWEST = 2

Run = Callable[[nn.Module, bool], FakeStep]


@dataclass(frozen=True)
class Extrapolated:
    """The step of the whole model.

    Args:
        step: Its bytes.
        per_layer: What one layer keeps, on average over the runs; 0 where no runs were found.
        exact: Whether three sizes lay on a line, or all layers were run.
    """

    step: FakeStep
    per_layer: int


def whole_step(model: nn.Module, run: Run, config: CompressionConfig | None) -> Extrapolated:
    """The bytes of a step of the model, out of models with fewer layers where the layers are of one kind.

    Args:
        model: On the meta device.
        run: Gives the step of a model; its second argument asks for the roles.
        config: What `run` patches with.
    """
    runs = [found for found in find_runs(model, config) if found.units > _FEWEST + 2]
    if not runs:
        return Extrapolated(run(model, True), 0)
    with shortened(model, dict.fromkeys(runs, _FEWEST)):
        base = run(model, True)
    slopes = {}
    for longer in runs:
        sizes = [_with(model, runs, longer, more, run) for more in (1, 2)]
        slopes[longer] = sizes[0].plus(base, -1)
        # a line through three points, or there is something that this does not know
        if _plain(sizes[1].plus(sizes[0], -1)) != _plain(slopes[longer]):
            return Extrapolated(run(model, True), 0)
    total = base
    for found in runs:
        total = total.plus(slopes[found], found.units - _FEWEST)
    layers = sum(found.units * found.period for found in runs)
    kept = sum(slopes[found].kept * found.units for found in runs)
    return Extrapolated(total, kept // layers)


def _with(model: nn.Module, runs: list[LayerRun], longer: LayerRun, more: int, run: Run) -> FakeStep:
    units = {found: _FEWEST + (more if found is longer else 0) for found in runs}
    with shortened(model, units):
        # the roles need two sizes
        return run(model, more == 1)


def _plain(step: FakeStep) -> tuple[int, int]:
    return step.kept, step.peak
