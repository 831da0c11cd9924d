"""Copies of a model that are made once for all batches: to make one takes as long as to run a step on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from .fake_step.ready import Ready, is_reusable, ready
from .fake_step.setting import Setting
from .fake_step.step import FakeStep, run_again, run_step
from .layers import LayerRun


class RunStep(Protocol):
    """`run_step`, or what stands in for it."""

    def __call__(self, model: nn.Module, setting: Setting, *, roles: bool) -> FakeStep: ...


class Copies:
    """Of one model, under the config that was asked for last."""

    def __init__(self) -> None:
        self._under: Any = None
        # by how many layers each run has
        self._copies: dict[tuple[int, ...], Ready] = {}

    def run_step(self, setting: Setting, checkpointing: bool, layers: Sequence[LayerRun]) -> RunStep:
        """A `run_step` for the model under that setting, shortened in these runs of layers or not."""
        if not is_reusable(setting):
            return run_step
        if self._under != (setting.config, checkpointing):
            self._under, self._copies = (setting.config, checkpointing), {}

        def step(model: nn.Module, setting: Setting, *, roles: bool) -> FakeStep:
            depth = tuple(len(model.get_submodule(run.name)) for run in layers)  # type: ignore[arg-type]
            # of one in which a step has failed nobody knows what is left
            copy = self._copies.pop(depth, None)
            if copy is None or (roles and not copy.roles):
                copy = ready(model, setting, roles=roles)
            found = run_again(copy, setting, roles=roles)
            self._copies[depth] = copy
            return found

        return step
