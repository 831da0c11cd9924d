"""Code that changes its module, or what the module holds, runs once in each call, and not in a trace beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_actcompress import patch_model
from tests.families import relative_error, step
from tests.layers.plans import PLANS, calls, pair, plans_of


class _Samples:
    """Gives one number after the other, and knows how many it has given."""

    def __init__(self) -> None:
        self.index, self.given = 0, [0.0]

    def get(self) -> float:
        self.index += 1
        return self.index / 8


class _Scaled(nn.Module):
    def __init__(self, linear: nn.Linear, how: str) -> None:
        super().__init__()
        self.linear, self.how = linear, how
        self.samples, self.seen, self.count = _Samples(), [], 0  # type: ignore[var-annotated]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.how == "object":
            return y * self.samples.get()
        if self.how == "attribute":
            self.count += 1
            return y * self.count
        held: Any = self.seen if self.how == "list" else self.samples.given
        held.append(1.0)
        return y * len(held)


@pytest.mark.parametrize("how", ["object", "list", "list of an object", "attribute"])
def test_it_runs_once(how: str) -> None:
    stock, ours = pair("llama")
    for model in (stock, ours):
        for layer in model.model.layers:
            layer.mlp.down_proj = _Scaled(layer.mlp.down_proj, how)
    batch = {"input_ids": torch.arange(10, 26).view(2, 8), "labels": torch.arange(10, 26).view(2, 8)}
    for _ in range(3):
        (loss, grads), (expected_loss, expected) = step(ours, batch), step(stock, batch)
        assert torch.equal(loss, expected_loss)
        assert relative_error(grads, {name: grad.double() for name, grad in expected.items()}) < 1e-6
    held, expected_held = (
        [(x.samples.index, x.seen, x.samples.given, x.count) for x in model.modules() if isinstance(x, _Scaled)]
        for model in (ours, stock)
    )
    assert held == expected_held
    assert calls(ours) == [0, 0]
    assert all("its code changes mlp.down_proj" in plans.why for plans in plans_of(ours))


def test_what_does_not_change_is_no_reason() -> None:
    model, _ = pair("llama")
    for layer in model.model.layers:
        layer.mlp.notes = {"a": [1], "b": _Samples()}
    patch_model(model, PLANS)
    step(model, {"input_ids": torch.arange(10, 26).view(2, 8), "labels": torch.arange(10, 26).view(2, 8)})
    assert calls(model) == [1, 1]
