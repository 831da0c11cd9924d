"""The ways in which a class is trained for the comparison, and what a model needs for each."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peft
import torch
from torch import Tensor, nn

from hf_actcompress import kept_bytes
from tests.families import mode_of

from ..modes import Mode
from ..step import Outcome, oracle, run, seed_all, tensors

# projections of diffusers' attention, which recipes adapt
PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0")
Batch = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        name: Its name in `--ways` and in the table.
        dtype: "fp32" or "autocast" (bf16 autocast over fp32 weights).
        adapted: Whether LoRA adapters are trained instead of all weights.
        checkpointed: Whether diffusers' gradient checkpointing is on.
        preset: What `patch_model` is called with.
    """

    name: str
    dtype: str = "fp32"
    adapted: bool = False
    checkpointed: bool = False
    preset: str = "exact"

    @property
    def mode(self) -> Mode:
        return Mode(self.name, dtype=self.dtype)


WAYS = (
    Way("fp32"),
    Way("checkpointed", checkpointed=True),
    Way("lora", adapted=True),
    Way("autocast", dtype="autocast"),
    Way("int8", preset="int8"),
)
BY_NAME = {way.name: way for way in WAYS}


class LeftOut(Exception):
    """Why a way is not run; nothing is wrong with the class."""


def adapt(model: Any) -> Any:
    """The model with LoRA adapters that are not zero at the start, and all other weights frozen."""
    model.requires_grad_(False)
    torch.manual_seed(1)
    targets = targets_of(model)
    if not targets:
        raise LeftOut("no linear layer to adapt")
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    if hasattr(model, "add_adapter"):
        model.add_adapter(config)
    else:
        # what `add_adapter` calls, for classes that do not offer it
        peft.inject_adapter_in_model(config, model)
    return model


def targets_of(model: nn.Module) -> list[str]:
    """Attention's projections where they have diffusers' names; else the linear layers of all blocks."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    known = [name for name in linear if name.endswith(tuple(f".{part}" for part in PROJECTIONS))]
    return known or [name for name in linear if re.search(r"\.\d+\.", name)]


def checkpoint(model: Any) -> Any:
    if not getattr(model, "_supports_gradient_checkpointing", False):
        raise LeftOut("the class has no gradient checkpointing")
    model.enable_gradient_checkpointing()
    return model


def stepped(model: Any, batch: Batch, way: Way) -> Outcome:
    """The outputs and the gradients of a step."""
    return run(model, batch, way.mode)


def exact_step(model: Any, batch: Batch, way: Way) -> Outcome:
    """The same step in fp64."""
    return oracle(model, widened(batch), way.mode)


def widened(value: Any) -> Any:
    """A batch in fp64, with what is in its lists."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: widened(part) for name, part in value.items()}
    return type(value)(widened(part) for part in value) if isinstance(value, (list, tuple)) else value


def kept(model: Any, batch: Batch, way: Way) -> int:
    """What a step keeps for backward. The loss is the sum of the outputs, which keeps nothing itself."""

    def forward() -> Tensor:
        seed_all()
        with mode_of(way.dtype):
            out = model(**batch)
        parts = [x for _, x in tensors(out) if x.is_floating_point() and x.requires_grad]
        return torch.stack([x.sum().float() for x in parts]).sum()

    return kept_bytes(forward, "cpu")


def prepared(model: Any, way: Way, change: Callable[[Any], Any] = lambda model: model) -> Any:
    """A copy of the model as the way wants it, changed (patched) before checkpointing is turned on."""
    model = change(copy.deepcopy(model))
    return checkpoint(model) if way.checkpointed else model
