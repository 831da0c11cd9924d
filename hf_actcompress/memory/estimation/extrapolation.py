"""Computes the step of all layers from steps of two to four: each further layer of a run adds the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from .fake_step.step import FakeStep
from .growth import Growth, UnitPlaces, growth_of, peak_with, unit_of
from .layers import LayerRun, shortened

# the first layer differs where nothing before it needs a gradient (LoRA), so one layer alone says too little
FEWEST = 2

Run = Callable[[nn.Module, bool], FakeStep]


def can_be_short(run: LayerRun) -> bool:
    """Whether a few of its layers can stand for all; a run with fewer layers is run in full."""
    return run.units > FEWEST + 2


@dataclass(frozen=True)
class Extrapolated:
    """The step of the whole model.

    Args:
        step: The bytes of the whole model's step.
        per_layer: Bytes that one layer keeps, on average over the runs; 0 if no runs were found.
        alike: Whether further layers were found to add the same bytes; if not, all layers were run.
        units: For each run, where its layers are in the timelines; a run whose places could not be told is missing.
        base, more: The step of the shortest model, and each growth with how often it is added to that step.
    """

    step: FakeStep
    per_layer: int
    alike: bool
    units: Mapping[LayerRun, UnitPlaces] = field(default_factory=dict, compare=False, repr=False)
    base: FakeStep | None = field(default=None, compare=False, repr=False)
    more: Sequence[tuple[Growth, int]] = field(default=(), compare=False, repr=False)

    @property
    def has_longer(self) -> bool:
        """Whether each longer model was run, so that no growth is read off the shortest one."""
        return all(growth.longer is not None for growth, _ in self.more)


def whole_step(
    model: nn.Module,
    run: Run,
    layers: Sequence[LayerRun],
    alike: bool | None = None,
    units: Mapping[LayerRun, UnitPlaces] | None = None,
) -> Extrapolated:
    """The bytes of a step of the model, computed from shorter models where the layers are of one kind.

    Kept bytes grow linearly with the number of layers. The peak need not: with few layers it may be at a moment at
    which no layer's tensors are alive, such as the backward of an embedding; with many layers it is where all of them
    are. So each allocation of the shortest model is followed. From the end of the forward to the start of the backward
    a further layer's tensors are alive as well; at other moments they are not.

    Args:
        model: The model on the meta device.
        run: Runs a step of a model; its second argument says whether to attribute bytes to roles.
        layers: The model's runs of equal layers, under the config that `run` patches with.
        alike: What was found out about this model with another batch or config; None: find out.
        units: What was found out with another batch of the same model and config. The shortest model is enough then:
            its second layer says what a further one adds, but not by role.
    """
    runs = [found for found in layers if can_be_short(found)]
    if not runs or alike is False:
        return _all_run(model, run)
    with shortened(model, dict.fromkeys(runs, FEWEST)):
        base = run(model, True)
    read_off = _read_off(base, runs, units or {})
    if read_off is not None:
        return _whole(base, read_off, units or {})
    growths: dict[LayerRun, Growth] = {}
    found_units: dict[LayerRun, UnitPlaces] = {}
    for longer in runs:
        one_more = _with(model, runs, longer, 1, run)
        growth = growths[longer] = growth_of(base, one_more)
        unit = unit_of(base, one_more, growth)
        if unit is not None:
            found_units[longer] = unit
        followed = peak_with(base, [(growth, 1)]) == one_more.peak
        if followed and alike:
            continue
        two_more = _with(model, runs, longer, 2, run)
        kept = two_more.kept - one_more.kept == growth.step.kept
        if not (kept and followed and peak_with(base, [(growth, 2)]) == two_more.peak):
            return _all_run(model, run)
    return _whole(base, growths, found_units)


def _all_run(model: nn.Module, run: Run) -> Extrapolated:
    step = run(model, True)
    return Extrapolated(step, 0, False, base=step)


def _read_off(
    base: FakeStep, runs: Sequence[LayerRun], units: Mapping[LayerRun, UnitPlaces]
) -> dict[LayerRun, Growth] | None:
    """What a further unit of each run adds; None if that is not known for every run."""
    growths: dict[LayerRun, Growth] = {}
    for run in runs:
        growth = units[run].growth(base) if run in units else None
        if growth is None:
            return None
        growths[run] = growth
    return growths


def _whole(base: FakeStep, growths: Mapping[LayerRun, Growth], units: Mapping[LayerRun, UnitPlaces]) -> Extrapolated:
    more = [(growth, found.units - FEWEST) for found, growth in growths.items()]
    total = base
    for growth, times in more:
        total = total.plus(growth.step, times)
    count = sum(found.units * found.period for found in growths)
    per_layer = sum(growth.step.kept * found.units for found, growth in growths.items()) // count
    return Extrapolated(replace(total, peak=peak_with(base, more)), per_layer, True, units, base, more)


def _with(model: nn.Module, runs: list[LayerRun], longer: LayerRun, more: int, run: Run) -> FakeStep:
    units = {found: FEWEST + (more if found is longer else 0) for found in runs}
    with shortened(model, units):
        # bytes by role can only be computed from the two shortest models
        return run(model, more == 1)
