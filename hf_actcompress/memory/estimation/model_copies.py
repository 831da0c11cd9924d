"""Copies of a model, each made once for all batches, because making one takes as long as running a step on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from ...models.root import root_of
from .extrapolation import FEWEST, can_be_short
from .fake_step.ready import Ready, is_reusable, ready
from .fake_step.setting import Setting
from .fake_step.step import FakeStep, run_again, run_step
from .layers import LayerRun, shortened


class RunStep(Protocol):
    """The signature of `run_step`, for what can be called in its place."""

    def __call__(self, model: nn.Module, setting: Setting, *, roles: bool) -> FakeStep: ...


@dataclass(frozen=True)
class _Copy:
    """A copy of the model, and how many units it has of each run of layers."""

    ready: Ready
    units: dict[LayerRun, int]

    def is_of(self, units: dict[LayerRun, int], roles: bool) -> bool:
        """Whether a step with these units and roles can be run on this copy, or on a part of it."""
        return all(self.units[run] >= count for run, count in units.items()) and (not roles or bool(self.ready.roles))


class ModelCopies:
    """The copies of one model, under the config that was asked for last."""

    def __init__(self) -> None:
        self._under: Any = None
        self._copy: _Copy | None = None

    def run_step(self, whole: nn.Module, setting: Setting, checkpointing: bool, layers: Sequence[LayerRun]) -> RunStep:
        """A `run_step` for the model under that setting, which may shorten the model in these runs of layers.

        For each run of layers the copy has one unit more than the shortest model. So it is patched once and serves both
        depths.
        """
        if not is_reusable(setting):
            return run_step
        if self._under != (setting.config, checkpointing):
            self._under, self._copy = (setting.config, checkpointing), None
        lists = {run: whole.get_submodule(run.name) for run in layers}

        def step(model: nn.Module, setting: Setting, *, roles: bool) -> FakeStep:
            units = {run: run.units_of(model.get_submodule(run.name)) for run in layers}
            # a step that fails may leave its copy in any state, so the copy is dropped first
            copy, self._copy = self._copy, None
            if copy is None or not copy.is_of(units, roles):
                deep = {run: max(count, FEWEST + 1) if can_be_short(run) else count for run, count in units.items()}
                with shortened(model, deep, lists):
                    copy = _Copy(ready(model, setting, roles=roles), deep)
            with shortened(copy.ready.model, units):
                if (root := root_of(copy.ready.model)) is not None:
                    # its modules are all patched, so it need not look again because it was shortened
                    root.note_structure()
                found = run_again(copy.ready, setting, roles=roles)
            self._copy = copy
            return found

        return step
