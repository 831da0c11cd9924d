"""What training in bf16 does to a gradient: the unit in which errors of presets are counted."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .jobs import Job
from .models import without_dropout

WAYS = ("autocast", "weights")

Gradients = dict[str, Tensor]


def gradients(model: Any, batch: dict[str, Tensor], *, autocast: bool = False) -> Gradients:
    """The gradient of each parameter, in fp32."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**batch).loss
    loss.backward()
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def error(found: Gradients, exact: Gradients, names: Sequence[str] = ()) -> float:
    """The norm of the difference over the norm of the exact gradient, of all parameters or of some as one vector."""
    chosen = list(names or exact)
    off = torch.stack([(found[name] - exact[name]).norm() for name in chosen]).norm()
    return float(off / torch.stack([exact[name].norm() for name in chosen]).norm())


def bf16_errors(job: Job, batches: int) -> dict[str, list[float]]:
    """Errors of bf16 autocast over fp32 weights, and of a model whose weights are in bf16, on each of some batches."""
    model = without_dropout(copy.deepcopy(job.model)).train()
    rounded = copy.deepcopy(model).bfloat16()
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for batch in job.batches(0, batches):
        exact = gradients(model, batch)
        found["autocast"].append(error(gradients(model, batch, autocast=True), exact))
        found["weights"].append(error(gradients(rounded, batch), exact))
    return found
