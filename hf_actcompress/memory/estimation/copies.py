"""Copies of a model that are made once for all batches: to make one takes as long as to run a step on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from .extrapolation import FEWEST, can_be_short
from .fake_step.ready import Ready, is_reusable, ready
from .fake_step.setting import Setting
from .fake_step.step import FakeStep, run_again, run_step
from .layers import LayerRun, shortened


class RunStep(Protocol):
    """`run_step`, or what stands in for it."""

    def __call__(self, model: nn.Module, setting: Setting, *, roles: bool) -> FakeStep: ...


@dataclass(frozen=True)
class _Copy:
    """A copy, and how many units of each run it has."""

    ready: Ready
    units: dict[LayerRun, int]

    def is_of(self, units: dict[LayerRun, int], roles: bool) -> bool:
        """Whether such a step can be run on it, or on a part of it."""
        return all(self.units[run] >= count for run, count in units.items()) and (not roles or bool(self.ready.roles))


class Copies:
    """Of one model, under the config that was asked for last."""

    def __init__(self) -> None:
        self._under: Any = None
        self._copy: _Copy | None = None

    def run_step(self, whole: nn.Module, setting: Setting, checkpointing: bool, layers: Sequence[LayerRun]) -> RunStep:
        """A `run_step` for the model under that setting, shortened in these runs of layers or not.

        The copy has one unit of each run more than the shortest model has: for both depths it is patched once.
        """
        if not is_reusable(setting):
            return run_step
        if self._under != (setting.config, checkpointing):
            self._under, self._copy = (setting.config, checkpointing), None
        lists = {run: whole.get_submodule(run.name) for run in layers}

        def step(model: nn.Module, setting: Setting, *, roles: bool) -> FakeStep:
            units = {run: run.units_of(model.get_submodule(run.name)) for run in layers}
            # of one in which a step has failed nobody knows what is left
            copy, self._copy = self._copy, None
            if copy is None or not copy.is_of(units, roles):
                deep = {run: max(count, FEWEST + 1) if can_be_short(run) else count for run, count in units.items()}
                with shortened(model, deep, lists):
                    copy = _Copy(ready(model, setting, roles=roles), deep)
            with shortened(copy.ready.model, units):
                found = run_again(copy.ready, setting, roles=roles)
            self._copy = copy
            return found

        return step
