"""`plan`: for each layer the cheapest way to keep it, so that training fits a budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ...config import PRESETS, CompressionConfig
from ...errors import DoesNotFitError, MeasurementError, UnknownOptionError
from ...models.checkpointing import checkpointable
from ...models.root import root_module
from ...quick.headroom import HEADROOM, usable
from ...quick.sizes import parse_size, readable_size
from ..estimation.assembly import estimate_of
from ..estimation.checks import on_cuda
from ..estimation.fake_step.setting import Setting
from ..estimation.fake_step.step import FakeStep, run_counted, run_step
from ..estimation.largest import max_batch_size, max_seq_len
from ..estimation.layers import find_runs
from ..estimation.meta_model import dtype_of, skeleton
from ..estimation.result import Estimate
from ..estimation.states.held import context_bytes, state_bytes
from ..estimation.states.optimizers import OptimizerRule, optimizer_rule
from ..measurement.saved_tensors import layer_names
from .costs import DeviceModel
from .knapsack import choose, undominated
from .options import (
    CHECKPOINTS,
    OPTIONS,
    LayerOption,
    Measured,
    config_of,
    layer_options,
    measure,
    to_measure,
)
from .result import Plan, PlanRow

__all__ = ["Plan", "PlanRow", "plan"]

OBJECTIVES = ("speed", "fidelity")
_ROUNDS = 5
# the search ends when less than one part in this many of the budget is unused
_CLOSE = 64


@dataclass(frozen=True)
class _Problem:
    """The input of the search: the model on the meta device, how its step is run, each layer's options in order."""

    model: nn.Module
    setting: Setting
    optimizer: str
    names: tuple[str, ...]
    options: tuple[tuple[LayerOption, ...], ...]
    outside: int
    transients: dict[str, int]
    objective: str
    headroom: float

    @property
    def rule(self) -> OptimizerRule:
        return optimizer_rule(self.optimizer)

    def config(self, picks: Sequence[LayerOption]) -> CompressionConfig:
        return config_of(zip(self.names, picks, strict=True))

    def estimate(self, picks: Sequence[LayerOption]) -> Estimate:
        return estimate_of(self.model, replace(self.setting, config=self.config(picks)), self.rule, "plan")

    def cost(self, picks: Iterable[LayerOption]) -> float:
        return sum(option.weighed(self.objective).cost for option in picks)

    def exact(self) -> _Problem:
        """The same problem without lossy options."""
        return replace(self, options=tuple(tuple(o for o in options if not o.error) for options in self.options))

    def smallest(self) -> list[LayerOption]:
        return _ordered(self, [min(options, key=lambda option: option.nbytes) for options in self.options])

    def cheapest(self, room: int) -> list[LayerOption]:
        """The cheapest choice whose layers keep at most `room` bytes; the smallest choice if none fits."""
        picks = choose([[o.weighed(self.objective) for o in options] for options in self.options], max(room, 0))
        if picks is None:
            return self.smallest()
        return _ordered(self, [options[i] for options, i in zip(self.options, picks, strict=True)])

    def transient(self, picks: Iterable[LayerOption]) -> int:
        """The bytes that the peak is expected to have above what is kept."""
        used = {name for option in picks for name in option.name.split("/")}
        return max(self.transients[name] for name in used)


def plan(
    model: Any,
    *,
    batch_size: int,
    seq_len: int,
    budget: int | str | None = None,
    headroom: float = HEADROOM,
    objective: str = "fidelity",
    allow: Sequence[str] = OPTIONS,
    dtype: torch.dtype | str | None = None,
    optimizer: str = "adamw",
    lora: Any = None,
    device: str = "cuda",
    autocast: torch.dtype | str | None = None,
    device_model: DeviceModel | None = None,
    quantization: Any = None,
    trust_remote_code: bool = False,
) -> Plan:
    """How to keep each layer's tensors so that training fits, at the least cost. Needs no weights and no GPU.

    A few steps on fake tensors say what each option keeps per layer. Dynamic programming picks one option per layer
    and, among norm, MLP and attention tensors, one per group. The whole plan is then run on fake tensors, and corrected
    until it fits. Checkpointed layers come first and the least exact layers next, because there their peaks and
    errors reach the fewest other layers.

    Args:
        model: As for `estimate`.
        batch_size, seq_len: Size of the batch: sequences, and tokens per sequence.
        budget: Bytes of the device, or a text such as "22GiB". CUDA's context takes its part of them. None: the
            whole memory of the first CUDA device.
        headroom: The share of the budget that is left free, because an allocator cannot use every gap.
        objective: "fidelity": an exact plan if one fits, and among those the one that takes the least time; else the
            one with the least error. "speed" asks for lossy plans, too: the one that takes the least time. A lossy
            plan says what it saves beside the fastest exact one that fits.
        allow: The options: exact, int8, fp8, int4, offload, checkpoint, checkpoint_with_attention (attention's
            output is kept as well, so its kernel does not run again), compressed_checkpoint (the layer's input is
            kept in 8 bits), offloaded_checkpoint (it is kept in host memory). "exact" is always allowed.
        dtype, optimizer, lora, device, autocast, quantization, trust_remote_code: As for `estimate`.
        device_model: The speeds that times are computed with; by default those of planning/costs.py.

    Returns:
        The plan; pass it to `patch_model`.

    Raises:
        DoesNotFitError: Even the smallest plan is too large. The message says by how much, and which batch or
            sequence would fit.
        UnknownOptionError: An objective, device or option that does not exist, or a headroom outside of [0, 1).
        UnsupportedModelError: No two layers of the model are alike.
        The errors of `estimate`.
    """
    if objective not in OBJECTIVES:
        raise UnknownOptionError("objective", objective, OBJECTIVES)
    unknown = [name for name in allow if name not in OPTIONS]
    if unknown:
        raise UnknownOptionError("option of a plan", unknown[0], OPTIONS)
    cuda, _ = on_cuda(device), optimizer_rule(optimizer)
    room = _device_bytes() if budget is None else parse_size(budget)
    usable(room, headroom)
    whole = skeleton(model, dtype_of(dtype), lora, False, quantization, trust_remote_code)
    setting = Setting(batch_size, seq_len, PRESETS["exact"], cuda, dtype_of(autocast))
    problem = _problem(whole, setting, optimizer, ("exact", *allow), objective, device_model or DeviceModel())
    return _solve(replace(problem, headroom=headroom), room)


def _device_bytes() -> int:
    if not torch.cuda.is_available():
        raise MeasurementError(
            'there is no CUDA device whose capacity could be the budget; pass one: "22GiB", or --gpu 24'
        )
    return int(torch.cuda.get_device_properties(0).total_memory)


def _problem(
    model: nn.Module,
    setting: Setting,
    optimizer: str,
    allow: Sequence[str],
    objective: str,
    device: DeviceModel,
) -> _Problem:
    names = tuple(layer_names(model))
    # a user's wrapper adds a prefix to the names; `patch_model` names the layers below it
    prefix = next((name for name, module in model.named_modules() if module is root_module(model)), "")
    parts = tuple(name.removeprefix(f"{prefix}.") for name in names)
    checkpoints = checkpointable(model)
    measured = {}
    for option in to_measure(allow, may_checkpoint=set(names) <= set(checkpoints)):
        config = PRESETS.get(option) or CompressionConfig(checkpoint=parts, **dict(CHECKPOINTS[option]))  # type: ignore[arg-type]
        run = partial(run_step, setting=replace(setting, config=config), roles=True)
        measured[option] = measure(model, run)
    options = _options(model, names, measured, allow, setting, device, objective)
    exact = measured["exact"]
    inside = sum(found.count * step.kept for found, step in exact.layers.items())
    transients = {name: found.whole.peak - found.whole.kept for name, found in measured.items()}
    outside = exact.whole.kept - inside
    return _Problem(model, setting, optimizer, parts, options, outside, transients, objective, 0.0)


def _options(
    model: nn.Module,
    names: Sequence[str],
    measured: dict[str, Measured[FakeStep]],
    allow: Sequence[str],
    setting: Setting,
    device: DeviceModel,
    objective: str,
) -> tuple[tuple[LayerOption, ...], ...]:
    by_list = {}
    work = measure(model, lambda part: run_counted(part, setting)).layers
    for run in find_runs(model):
        every = layer_options(run, measured, work[run], device)
        found = [option for option in every if option.name not in CHECKPOINTS or option.name in allow]
        # an exact option that a lossy one beats is kept, too, because plans without lossy options need it
        several = (found, [option for option in found if not option.error])
        best = [some[i] for some in several for i in undominated([option.weighed(objective) for option in some])]
        by_list[run.name] = tuple(dict.fromkeys(best))
    return tuple(by_list[name.rpartition(".")[0]] for name in names)


def _ordered(problem: _Problem, picks: list[LayerOption]) -> list[LayerOption]:
    """The same options in another order. Layers of one list are alike, so any of them can take any option."""
    lists: dict[str, list[LayerOption]] = {}
    for name, option in zip(problem.names, picks, strict=True):
        lists.setdefault(name.rpartition(".")[0], []).append(option)
    for options in lists.values():
        options.sort(key=lambda option: (option.name not in CHECKPOINTS, -option.error, option.nbytes))
    return [option for options in lists.values() for option in options]


def _solve(problem: _Problem, whole_budget: int) -> Plan:
    budget = usable(whole_budget, problem.headroom)
    best = _cheapest(problem, budget)
    if best is None:
        raise _does_not_fit(problem, problem.estimate(problem.smallest()), whole_budget)
    lossy = any(option.error for option in best[0])
    exact = _cheapest(problem.exact(), budget) if lossy else None
    if exact is not None and problem.cost(exact[0]) <= problem.cost(best[0]):
        best, exact = exact, None
    picks, found = best
    rows = tuple(
        PlanRow(name, option.name, option.nbytes, option.time, option.error)
        for name, option in zip(problem.names, picks, strict=True)
    )
    exact_time = None if exact is None else sum(option.time for option in exact[0]) / len(exact[0])
    return Plan(whole_budget, problem.objective, rows, problem.config(picks), found, exact_time)


def _cheapest(problem: _Problem, budget: int) -> tuple[list[LayerOption], Estimate] | None:
    """The cheapest choice that is found within `budget`, and its estimate; None if even the smallest is too large."""
    setting = problem.setting
    fixed = sum(state_bytes(problem.model, setting, problem.rule)) + context_bytes(setting) + problem.outside
    room = budget - fixed - problem.transients["exact"]
    # the room once more, now with the transient bytes of the options that were picked
    picks = problem.cheapest(room)
    room = budget - fixed - problem.transient(picks)
    # the bound for the next rounds, so that a choice that was too large is not picked again
    most = budget
    best: tuple[list[LayerOption], Estimate] | None = None
    tried: list[list[LayerOption]] = []
    while len(tried) < _ROUNDS and (picks := problem.cheapest(room)) not in tried:
        tried.append(picks)
        found = problem.estimate(picks)
        left = budget - found.device_bytes
        if left >= 0 and (best is None or problem.cost(picks) < problem.cost(best[0])):
            best = picks, found
        if 0 <= left < budget // _CLOSE or (left >= 0 and problem.cost(picks) == 0):
            break
        if left < 0:
            most = min(most, sum(option.nbytes for option in picks) - 1)
        room = min(room + left, most)
    if best is None:
        best = problem.smallest(), problem.estimate(problem.smallest())
    return best if best[1].device_bytes <= budget else None


def _does_not_fit(problem: _Problem, found: Estimate, budget: int) -> DoesNotFitError:
    room = usable(budget, problem.headroom)
    missing = found.device_bytes - room
    setting, config = problem.setting, problem.config(problem.smallest())
    options: dict[str, Any] = {"config": config, "device": found.device, "autocast": setting.autocast}
    options["optimizer"] = problem.optimizer
    b = max_batch_size(problem.model, seq_len=setting.seq_len, budget=room, **options)
    s = max_seq_len(problem.model, batch_size=setting.batch_size, budget=room, limit=setting.seq_len, **options)
    would = [f"a batch of {b}"] if b else []
    would += [f"sequences of {s}"] if s else []
    instead = f"{' or '.join(would)} would fit" if would else "no batch or sequence would fit"
    left_free = f", of which {problem.headroom:.0%} stay free (headroom)" if problem.headroom else ""
    message = (
        f"the smallest plan for batch {setting.batch_size} x {setting.seq_len} needs "
        f"{readable_size(found.device_bytes)}, {readable_size(missing)} more than the budget of "
        f"{readable_size(budget)}{left_free}; {instead}"
    )
    return DoesNotFitError(message, missing, b, s)
