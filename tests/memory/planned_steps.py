"""The step of a model that is patched with a plan, on the allocator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_actcompress import measure_step, patch_model, unpatch_model
from hf_actcompress.memory import Plan


def peak_with(found: Plan, model: Any, ids: torch.Tensor, look: Callable[[Any], None] = lambda patched: None) -> int:
    """The peak of a step on `ids` with the plan as JSON gives it back. `look` sees the patched model before it."""

    def step() -> None:
        patched(input_ids=ids, labels=ids).loss.backward()

    patched = patch_model(model, Plan.from_json(found.to_json()))
    try:
        look(patched)
        step()
        return measure_step(step, "cpu").peak_bytes
    finally:
        unpatch_model(patched)
        patched.zero_grad(set_to_none=True)
