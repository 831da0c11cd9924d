"""From two to four layers to all of them, exactly: every further layer of a run adds the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from torch import nn

from .fake_step.step import FakeStep
from .layers import LayerRun, shortened

# the first layer differs where nothing before it needs a gradient (LoRA), so one layer says nothing about the others
_FEWEST = 2

Run = Callable[[nn.Module, bool], FakeStep]


@dataclass(frozen=True)
class Extrapolated:
    """The step of the whole model.

    Args:
        step: Its bytes.
        per_layer: What one layer keeps, on average over the runs; 0 where no runs were found.
        alike: Whether further layers were found to add the same; otherwise all layers were run.
    """

    step: FakeStep
    per_layer: int
    alike: bool


@dataclass(frozen=True)
class Growth:
    """What one more unit of a run adds, and where in the timeline of the shorter model.

    Args:
        step: Its bytes.
        forward: (so many of the last allocations of the forward, bytes that they have on top).
        backward: (so many of the first ones of the backward, bytes that they have on top).
    """

    step: FakeStep
    forward: tuple[int, int]
    backward: tuple[int, int]


def whole_step(model: nn.Module, run: Run, layers: Sequence[LayerRun], alike: bool | None = None) -> Extrapolated:
    """The bytes of a step of the model, out of models with fewer layers where the layers are of one kind.

    What is kept grows along a line. The peak need not: with few layers it may be where none of them counts, in the
    backward of an embedding, and with many where all of them do. So each allocation of the shortest model is followed:
    at the end of the forward and the start of the backward a further layer's tensors are there too, elsewhere not.

    Args:
        model: On the meta device.
        run: Gives the step of a model; its second argument asks for the roles.
        layers: Its runs of equal layers, under the config that `run` patches with.
        alike: What another batch or config said of this model; None: find out.
    """
    runs = [found for found in layers if found.units > _FEWEST + 2]
    if not runs or alike is False:
        return Extrapolated(run(model, True), 0, False)
    with shortened(model, dict.fromkeys(runs, _FEWEST)):
        base = run(model, True)
    growths = {}
    for longer in runs:
        one_more = _with(model, runs, longer, 1, run)
        growth = growths[longer] = growth_of(base, one_more)
        followed = _peak(base, [(growth, 1)]) == one_more.peak
        if followed and alike:
            continue
        two_more = _with(model, runs, longer, 2, run)
        kept = two_more.kept - one_more.kept == growth.step.kept
        if not (kept and followed and _peak(base, [(growth, 2)]) == two_more.peak):
            return Extrapolated(run(model, True), 0, False)
    return _whole(base, growths)


def _whole(base: FakeStep, growths: Mapping[LayerRun, Growth]) -> Extrapolated:
    more = [(growth, found.units - _FEWEST) for found, growth in growths.items()]
    total = base
    for growth, times in more:
        total = total.plus(growth.step, times)
    count = sum(found.units * found.period for found in growths)
    per_layer = sum(growth.step.kept * found.units for found, growth in growths.items()) // count
    return Extrapolated(replace(total, peak=_peak(base, more)), per_layer, True)


def growth_of(base: FakeStep, longer: FakeStep) -> Growth:
    step = longer.plus(base, -1)
    # an autocast holds its casts until the forward has ended
    at_end = longer.forward[-1] - base.forward[-1]
    forward = _in_common(reversed(base.forward), reversed(longer.forward), at_end)
    return Growth(step, (forward, at_end), (_in_common(base.backward, longer.backward, step.kept), step.kept))


def _in_common(shorter: Iterable[int], longer: Iterable[int], apart: int) -> int:
    """How many allocations, from the start, are the same but for `apart` bytes."""
    return sum(1 for _ in takewhile(lambda pair: pair[1] - pair[0] == apart, zip(shorter, longer, strict=False)))


def _peak(base: FakeStep, more: Sequence[tuple[Growth, int]]) -> int:
    """Of the model with so many further units of each run."""
    forward = [(reach, times * nbytes) for growth, times in more for reach, nbytes in [growth.forward]]
    backward = [(reach, times * nbytes) for growth, times in more for reach, nbytes in [growth.backward]]
    return max(
        live + sum(nbytes for reach, nbytes in added if position < reach)
        for series, added in ((reversed(base.forward), forward), (base.backward, backward))
        for position, live in enumerate(series)
    )


def _with(model: nn.Module, runs: list[LayerRun], longer: LayerRun, more: int, run: Run) -> FakeStep:
    units = {found: _FEWEST + (more if found is longer else 0) for found in runs}
    with shortened(model, units):
        # the roles need two sizes
        return run(model, more == 1)
