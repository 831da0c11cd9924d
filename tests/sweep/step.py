"""Runs one step of one model in one mode, and returns what comes out of it."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.families import Fp64, Gradients, cast_batch, differing, mode_of, relative_error
from tests.oracle import pattern

from .modes import Mode

Batch = dict[str, Any]
SEED = 7


@dataclass
class Outcome:
    """Everything that a step gives: float and other outputs by path, gradients and buffers by name."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def seed_all(seed: int = SEED) -> None:
    """Models draw from torch (dropout), numpy (SpecAugment) and Python (layer drop)."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def prepare(model: Any, mode: Mode) -> Any:
    """Sets train or eval mode, and turns gradient checkpointing on as the Trainer does."""
    model.train(mode.train)
    if mode.checkpointing:
        reentrant = mode.checkpointing == "reentrant"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
    return model


def run(model: Any, batch: Batch, mode: Mode) -> Outcome:
    """The step, from a fixed seed. Whatever the model raises is raised."""
    seed_all()
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    inputs = cast_batch(batch, dtype)
    if mode.checkpointing == "reentrant":
        # pictures have no embedding layer whose output could be made to want a gradient
        inputs = {k: v.clone().requires_grad_() if _floats(v) and "pixel" in k else v for k, v in inputs.items()}
    with torch.set_grad_enabled(mode.grad), mode_of(mode.dtype):
        out = model(**inputs, **dict.fromkeys(mode.asked, True))
        loss = loss_of(out, has_labels(batch)) if mode.grad else None
    outcome = Outcome({path: x.detach() for path, x in tensors(out)})
    if loss is not None:
        torch.autograd.backward(loss)
        outcome.outputs["own loss"] = loss.detach()
        outcome.gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    outcome.buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
    return outcome


def oracle(model: Any, batch: Batch, mode: Mode) -> Outcome:
    """The same step of a copy in fp64 throughout."""
    # checkpointing changes nothing in the values, and its recomputation would leave fp64
    exact = replace(mode, dtype="fp32", checkpointing="")
    wide = copy.deepcopy(model).double()
    if hasattr(wide, "set_experts_implementation"):
        # torch's grouped product has no fp64
        wide.set_experts_implementation("eager")
    with Fp64():
        return run(prepare(wide, exact), batch, exact)


def has_labels(batch: Batch) -> bool:
    return "labels" in batch or "start_positions" in batch


def loss_of(out: Any, labelled: bool) -> Tensor:
    """The model's loss, or a fixed function of all its float outputs."""
    loss = own_loss(out) if labelled else None
    if loss is not None:
        return loss
    parts = [x for _, x in tensors(out) if x.is_floating_point() and x.requires_grad]
    if not parts:
        raise ValueError("no output wants a gradient")
    # only finite parts count, because some models return logits of minus infinity on purpose
    return torch.stack([_weighed(x) for x in parts]).sum()


def own_loss(out: Any) -> Tensor | None:
    """The loss that the model has computed itself, []; None if it has not."""
    loss = getattr(out, "loss", None)
    return loss.reshape(()) if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad else None


def _weighed(x: Tensor) -> Tensor:
    y = x.float()
    finite = y.detach().abs() < 1e30
    weighed: Tensor = torch.where(finite, y, torch.zeros_like(y)) * pattern(x).to(y.dtype)
    total: Tensor = weighed.sum() / max(x.numel(), 1) ** 0.5
    return total


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a model's output, with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from tensors(part, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            yield from tensors(part, f"{path}[{i}]")


def _floats(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def roughened(model: nn.Module) -> nn.Module:
    """Constant parameters get noise: zero biases and unit gains would hide errors in what is done to them."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() and p.numel() > 0 and p.min() == p.max():
                p.add_(torch.randn(p.shape, generator=generator).to(p.dtype) * 0.05)
    return model


def jittered(model: Any, trial: int) -> Any:
    """A copy whose weights differ by some percent. For trial 0 it is a plain copy."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(trial)
    with torch.no_grad():
        for p in model.parameters() if trial else ():
            if p.is_floating_point():
                p.mul_(1 + 0.05 * torch.randn(p.shape, generator=generator).to(p.dtype))
    return model


def difference(found: Gradients, expected: Gradients) -> float:
    """The relative error of all gradients; 0 only if they are the same bits."""
    assert found.keys() == expected.keys() and all(g.any() for g in expected.values())
    return relative_error(found, expected) if differing(found, expected) else 0.0
