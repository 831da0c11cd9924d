"""`plan`: for each layer the cheapest way to keep it, so that training fits a budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...config import PRESETS
from ...errors import DoesNotFitError, MeasurementError, UnknownOptionError
from ...quick.cards import card_bytes
from ...quick.headroom import HEADROOM, usable
from ...quick.preset_lines import OBJECTIVES
from ...quick.sizes import readable_size
from ..estimation.checks import is_compiled, refuse_diffusion
from ..estimation.fake_step.setting import Setting
from ..estimation.largest import max_batch_size, max_seq_len
from ..estimation.meta_model import dtype_of, skeleton
from ..estimation.states.optimizers import optimizer_rule
from .costs import DeviceModel
from .options import OPTIONS, config_of_option
from .problem import Problem, Problems, Solution, cheapest
from .result import Plan, PlanRow

__all__ = ["Plan", "PlanRow", "plan"]


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
    engine: str | None = None,
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
        budget: Bytes of the device, or a text: "22GiB", or a card such as "rtx4090". CUDA's context takes its part of
            them. None: the whole memory of the first CUDA device.
        headroom: The share of the budget that is left free, because an allocator cannot use every gap.
        objective: "fidelity": an exact plan if one fits, and among those the one that takes the least time; else the
            one with the least error. "speed" asks for lossy plans, too: the one that takes the least time. A lossy
            plan says what it saves beside the fastest exact one that fits.
        allow: The options: exact, int8, fp8, int4, offload, checkpoint, checkpoint_with_attention (attention's
            output is kept as well, so its kernel does not run again), compressed_checkpoint (the layer's input is
            kept in 8 bits), offloaded_checkpoint (it is kept in host memory). One holds for the whole model, and is
            chosen only if something has to be saved: tiles (``tiled_mlp="auto"``); with nothing else it is the preset
            "long". "exact" is always allowed.
        dtype, optimizer, lora, device, autocast, engine, quantization, trust_remote_code: As for `estimate`. With
            engine="compile" nothing goes to the host, and MLPs are not computed in tiles.
        device_model: The speeds that times are computed with; by default those of planning/costs.py.

    Returns:
        The plan; pass it to `patch_model`.

    Raises:
        DoesNotFitError: Even the smallest plan is too large. The message says by how much, and which batch or
            sequence would fit.
        UnknownOptionError: An objective, device or option that does not exist, or a headroom outside of [0, 1).
        UnsupportedModelError: No two layers of the model are alike.
        ActCompressError: One of the errors of `estimate`.
    """
    if objective not in OBJECTIVES:
        raise UnknownOptionError("objective", objective, OBJECTIVES)
    unknown = [name for name in allow if name not in OPTIONS]
    if unknown:
        raise UnknownOptionError("option of a plan", unknown[0], OPTIONS)
    compiled, _ = is_compiled(model, device, engine), optimizer_rule(optimizer)
    if compiled:
        allow = [name for name in allow if not config_of_option(name).offloads and name != "tiles"]
    room = _device_bytes() if budget is None else card_bytes(budget)
    usable(room, headroom)
    refuse_diffusion(model)
    whole = skeleton(model, dtype_of(dtype), lora, False, quantization, trust_remote_code)
    setting = Setting(batch_size, seq_len, PRESETS["exact"], device == "cuda", dtype_of(autocast), compiled)
    problems = Problems(whole, setting, optimizer, objective, device_model or DeviceModel())
    return _solve(problems, ("exact", *allow), objective, room, headroom)


def _device_bytes() -> int:
    if not torch.cuda.is_available():
        raise MeasurementError(
            'there is no CUDA device whose capacity could be the budget; pass one: "22GiB", "rtx4090", or --gpu 24'
        )
    return int(torch.cuda.get_device_properties(0).total_memory)


def _solve(problems: Problems, allow: Sequence[str], objective: str, whole_budget: int, headroom: float) -> Plan:
    """The exact plan if that is what is asked for and one fits; else the cheapest of all."""
    budget = usable(whole_budget, headroom)
    exact = cheapest(problems.each([name for name in allow if config_of_option(name).lossless]), budget)
    if isinstance(exact, Solution) and objective == "fidelity":
        return _plan_of(exact, whole_budget)
    best = cheapest(problems.each(allow), budget)
    if isinstance(best, Problem):
        raise _does_not_fit(best, whole_budget, headroom)
    if isinstance(exact, Problem):
        return _plan_of(best, whole_budget)
    if exact.cost <= best.cost:
        return _plan_of(exact, whole_budget)
    return _plan_of(best, whole_budget, exact.time)


def _plan_of(found: Solution, budget: int, exact_time: float | None = None) -> Plan:
    problem = found.problem
    rows = tuple(
        PlanRow(name, option.name, option.nbytes, option.time, option.error)
        for name, option in zip(problem.names, found.picks, strict=True)
    )
    return Plan(budget, problem.objective, rows, problem.config(found.picks), found.estimate, exact_time)


def _does_not_fit(problem: Problem, budget: int, headroom: float) -> DoesNotFitError:
    room, found = usable(budget, headroom), problem.estimate(problem.smallest())
    missing = found.device_bytes - room
    setting, config = problem.setting, problem.config(problem.smallest())
    options: dict[str, Any] = {"config": config, "device": found.device, "autocast": setting.autocast}
    options |= {"optimizer": problem.optimizer, "engine": found.engine}
    b = max_batch_size(problem.model, seq_len=setting.seq_len, budget=room, **options)
    s = max_seq_len(problem.model, batch_size=setting.batch_size, budget=room, limit=setting.seq_len, **options)
    would = [f"a batch of {b}"] if b else []
    would += [f"sequences of {s}"] if s else []
    instead = f"{' or '.join(would)} would fit" if would else "no batch or sequence would fit"
    left_free = f", of which {headroom:.0%} stay free (headroom)" if headroom else ""
    message = (
        f"the smallest plan for batch {setting.batch_size} x {setting.seq_len} needs "
        f"{readable_size(found.device_bytes)}, {readable_size(missing)} more than the budget of "
        f"{readable_size(budget)}{left_free}; {instead}"
    )
    return DoesNotFitError(message, missing, b, s)
