"""What is chosen from: the ways to keep each layer with what they cost, and the search for the cheapest that fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from ...config import CompressionConfig
from ...models.checkpointing import checkpointable
from ...models.root import root_module
from ..estimation.assembly import estimate_of
from ..estimation.fake_step.arithmetic import Work
from ..estimation.fake_step.setting import Setting
from ..estimation.fake_step.step import FakeStep, run_counted, run_step
from ..estimation.layers import LayerRun, find_runs
from ..estimation.result import Estimate
from ..estimation.states.held import context_bytes, state_bytes
from ..estimation.states.optimizers import OptimizerRule, optimizer_rule
from ..measurement.saved_tensors import layer_names
from .costs import DeviceModel
from .knapsack import choose, undominated
from .options import (
    CHECKPOINTS,
    TILES,
    LayerOption,
    Measured,
    config_of,
    config_of_option,
    layer_options,
    measure,
    to_measure,
)

_ROUNDS = 5
# times are a model's: a plan that keeps all layers alike and copies nothing to the host is taken where another one is
# by less than this faster, as a fraction of the layers' forward and backward
_NEARLY = 0.05
# the search ends when less than one part in this many of the budget is unused
_CLOSE = 64


@dataclass(frozen=True)
class Problem:
    """The input of the search: the model on the meta device, how its step is run, each layer's options in order.

    Args:
        model, setting, optimizer: The model, its step, and the optimizer's name.
        whole: The fields that are set for the whole model.
        names: The layers.
        options: By layer, its options.
        outside: Bytes that are kept outside of layers.
        transients: By option, the bytes of the peak above what is kept if all layers are kept so.
        objective: "fidelity" or "speed".
    """

    model: nn.Module
    setting: Setting
    optimizer: str
    whole: Mapping[str, Any]
    names: tuple[str, ...]
    options: tuple[tuple[LayerOption, ...], ...]
    outside: int
    transients: Mapping[str, int]
    objective: str

    @property
    def rule(self) -> OptimizerRule:
        return optimizer_rule(self.optimizer)

    def config(self, picks: Sequence[LayerOption]) -> CompressionConfig:
        return replace(config_of(zip(self.names, picks, strict=True)), **self.whole)

    def estimate(self, picks: Sequence[LayerOption]) -> Estimate:
        return estimate_of(self.model, replace(self.setting, config=self.config(picks)), self.rule, "plan")

    def cost(self, picks: Iterable[LayerOption]) -> float:
        return sum(option.weighed(self.objective).cost for option in picks)

    def smallest(self) -> list[LayerOption]:
        return self._ordered([min(options, key=lambda option: option.nbytes) for options in self.options])

    def cheapest(self, room: int) -> list[LayerOption]:
        """The cheapest choice whose layers keep at most `room` bytes; the smallest choice if none fits."""
        picks = choose([[o.weighed(self.objective) for o in options] for options in self.options], max(room, 0))
        if picks is None:
            return self.smallest()
        return self._ordered([options[i] for options, i in zip(self.options, picks, strict=True)])

    def transient(self, picks: Iterable[LayerOption]) -> int:
        """The bytes that the peak is expected to have above what is kept."""
        used = {name for option in picks for name in option.name.split("/")}
        return max(self.transients[name] for name in used)

    def _ordered(self, picks: list[LayerOption]) -> list[LayerOption]:
        """The same options in another order. Layers of one list are alike, so any of them can take any option."""
        lists: dict[str, list[LayerOption]] = {}
        for name, option in zip(self.names, picks, strict=True):
            lists.setdefault(name.rpartition(".")[0], []).append(option)
        for options in lists.values():
            options.sort(key=lambda option: (option.name not in CHECKPOINTS, -option.error, option.nbytes))
        return [option for options in lists.values() for option in options]


@dataclass(frozen=True)
class Solution:
    """The cheapest choice that was found for a problem, and its estimate."""

    problem: Problem
    picks: list[LayerOption]
    estimate: Estimate

    @property
    def cost(self) -> float:
        return self.problem.cost(self.picks)

    @property
    def time(self) -> float:
        """Extra time of the layers, as a fraction of their forward and backward."""
        return sum(option.time for option in self.picks) / len(self.picks)

    @property
    def worth(self) -> float:
        """The cost per layer by which solutions of several problems are compared."""
        plain = len({option.settings for option in self.picks}) == 1 and not self.problem.config(self.picks).offloads
        return self.cost / len(self.picks) + (0.0 if plain else _NEARLY)


class Problems:
    """The problems of one training: with whole MLPs, and with MLPs in tiles. Each step is run once.

    Args:
        model: The model on the meta device.
        setting: How its step is run.
        optimizer, objective, device: As in `plan`.
    """

    def __init__(self, model: nn.Module, setting: Setting, optimizer: str, objective: str, device: DeviceModel) -> None:
        self._model, self._setting, self._optimizer = model, setting, optimizer
        self._objective, self._device = objective, device
        names = tuple(layer_names(model))
        # a user's wrapper adds a prefix to the names; `patch_model` names the layers below it
        prefix = next((name for name, module in model.named_modules() if module is root_module(model)), "")
        self._lists = tuple(name.rpartition(".")[0] for name in names)
        self._names = tuple(name.removeprefix(f"{prefix}.") for name in names)
        self._may_checkpoint = set(names) <= set(checkpointable(model))
        self._work: dict[LayerRun, Work] = {}
        # (option, whether MLPs are in tiles) -> what the step takes
        self._measured: dict[tuple[str, bool], Measured[FakeStep]] = {}

    def each(self, allow: Sequence[str]) -> Iterator[Problem]:
        """The problems with these options: with whole MLPs, and then in tiles, if these change a byte of this model."""
        yield self._problem(allow, False)
        if "tiles" not in allow:
            return
        whole, tiled = self._step("exact", False), self._step("exact", True)
        if (whole.whole, whole.layers) != (tiled.whole, tiled.layers):
            yield self._problem(allow, True)

    def _step(self, option: str, tiles: bool) -> Measured[FakeStep]:
        key = option, tiles
        if key not in self._measured:
            config = replace(config_of_option(option, self._names), **(TILES if tiles else {}))
            run = partial(run_step, setting=replace(self._setting, config=config), roles=True)
            self._measured[key] = measure(self._model, run)
        return self._measured[key]

    def _problem(self, allow: Sequence[str], tiles: bool) -> Problem:
        wanted = [name for name in allow if name != "tiles"]
        measured = {name: self._step(name, tiles) for name in to_measure(wanted, self._may_checkpoint)}
        exact = measured["exact"]
        return Problem(
            self._model,
            self._setting,
            self._optimizer,
            whole=TILES if tiles else {},
            names=self._names,
            options=self._options(measured, wanted, tiles),
            outside=exact.whole.kept - sum(found.count * step.kept for found, step in exact.layers.items()),
            transients={name: found.whole.peak - found.whole.kept for name, found in measured.items()},
            objective=self._objective,
        )

    def _options(
        self, measured: dict[str, Measured[FakeStep]], allow: Sequence[str], tiles: bool
    ) -> tuple[tuple[LayerOption, ...], ...]:
        by_list = {}
        if not self._work:
            stock = replace(self._setting, config=None, compiled=False)
            self._work = measure(self._model, lambda part: run_counted(part, stock)).layers
        for run in find_runs(self._model):
            every = layer_options(run, measured, self._work[run], self._device, tiles)
            found = [option for option in every if option.name not in CHECKPOINTS or option.name in allow]
            best = undominated([option.weighed(self._objective) for option in found])
            by_list[run.name] = tuple(found[i] for i in best)
        return tuple(by_list[name] for name in self._lists)


def cheapest(problems: Iterable[Problem], budget: int) -> Solution | Problem:
    """The cheapest solution of several problems within `budget`; if none has one, the problem that needs the least."""
    best: Solution | None = None
    least: tuple[int, Problem] | None = None
    for problem in problems:
        found = _solved(problem, budget)
        if isinstance(found, Solution):
            best = found if best is None or found.worth < best.worth else best
            if best.cost == 0:
                break
        elif least is None or found <= least[0]:
            least = found, problem
    if best is not None:
        return best
    assert least is not None
    return least[1]


def _solved(problem: Problem, budget: int) -> Solution | int:
    """The cheapest choice that is found within `budget`; if even the smallest is too large, the bytes that it needs."""
    setting = problem.setting
    fixed = sum(state_bytes(problem.model, setting, problem.rule)) + context_bytes(setting) + problem.outside
    room = budget - fixed - problem.transients["exact"]
    # the room once more, now with the transient bytes of the options that were picked
    picks = problem.cheapest(room)
    room = budget - fixed - problem.transient(picks)
    # the bound for the next rounds, so that a choice that was too large is not picked again
    most = budget
    best: Solution | None = None
    tried: list[list[LayerOption]] = []
    while len(tried) < _ROUNDS and (picks := problem.cheapest(room)) not in tried:
        tried.append(picks)
        found = Solution(problem, picks, problem.estimate(picks))
        left = budget - found.estimate.device_bytes
        if left >= 0 and (best is None or found.cost < best.cost):
            best = found
        if 0 <= left < budget // _CLOSE or (left >= 0 and found.cost == 0):
            break
        if left < 0:
            most = min(most, sum(option.nbytes for option in picks) - 1)
        room = min(room + left, most)
    if best is None:
        best = Solution(problem, problem.smallest(), problem.estimate(problem.smallest()))
    needed = best.estimate.device_bytes
    return best if needed <= budget else needed
