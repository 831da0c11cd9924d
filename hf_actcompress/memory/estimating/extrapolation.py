"""From two to four layers to all of them, exactly: every further layer of a run adds the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from .layers import LayerRun, shortened
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
        on_a_line: Whether three sizes lay on a line; otherwise all layers were run.
    """

    step: FakeStep
    per_layer: int
    on_a_line: bool


def whole_step(model: nn.Module, run: Run, layers: Sequence[LayerRun], on_a_line: bool | None = None) -> Extrapolated:
    """The bytes of a step of the model, out of models with fewer layers where the layers are of one kind.

    Args:
        model: On the meta device.
        run: Gives the step of a model; its second argument asks for the roles.
        layers: Its runs of equal layers, under the config that `run` patches with.
        on_a_line: What another batch or config said of this model; None: find out.
    """
    runs = [found for found in layers if found.units > _FEWEST + 2]
    if not runs or on_a_line is False:
        return Extrapolated(run(model, True), 0, False)
    with shortened(model, dict.fromkeys(runs, _FEWEST)):
        base = run(model, True)
    slopes = {}
    for longer in runs:
        one_more = _with(model, runs, longer, 1, run)
        slopes[longer] = slope = one_more.plus(base, -1)
        # nothing grows faster than what is kept, so a peak that grows as fast stays the peak
        if on_a_line and slope.peak == slope.kept:
            continue
        # a line through three points, or there is something that this does not know
        if _plain(_with(model, runs, longer, 2, run).plus(one_more, -1)) != _plain(slope):
            return Extrapolated(run(model, True), 0, False)
    total = base
    for found in runs:
        total = total.plus(slopes[found], found.units - _FEWEST)
    count = sum(found.units * found.period for found in runs)
    kept = sum(slopes[found].kept * found.units for found in runs)
    return Extrapolated(total, kept // count, True)


def _with(model: nn.Module, runs: list[LayerRun], longer: LayerRun, more: int, run: Run) -> FakeStep:
    units = {found: _FEWEST + (more if found is longer else 0) for found in runs}
    with shortened(model, units):
        # the roles need two sizes
        return run(model, more == 1)


def _plain(step: FakeStep) -> tuple[int, int]:
    return step.kept, step.peak
