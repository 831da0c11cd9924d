"""Backwards that a transform runs for several samples at once: ``is_grads_batched=True``, vectorised Jacobians."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.layers import handing
from tests.families import BY_NAME

NAMES = ("gpt2-gelu-new", "llama", "bert", "t5", "qwen3", "vit", "modernbert", "phi3")
CONFIGS: dict[str, Any] = {
    "plans": "exact",
    "leaf by leaf": CompressionConfig(plans=False),
    "long": "long",
    "its own code": CompressionConfig(plans=False, loss_head=False),
}


def _losses(model: Any, batch: dict[str, Any]) -> Tensor:
    """One loss for each sample."""
    torch.manual_seed(5)
    logits = model(**{name: x for name, x in batch.items() if name != "labels"}).logits
    return logits.float().square().flatten(1).mean(1)


def _for_each_sample(name: str, config: Any, **options: Any) -> tuple[Tensor | None, ...]:
    family = BY_NAME[name]
    model = family.build(dropout=0.1, **options)
    if config is not None:
        patch_model(model, config)
    batch = family.make_batch()
    if name == "t5":
        batch["decoder_input_ids"] = batch["labels"].clamp(min=0)
    losses = _losses(model, batch)
    ones = torch.eye(losses.numel())
    return torch.autograd.grad(losses, list(model.parameters()), ones, is_grads_batched=True, allow_unused=True)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_for_each_sample_are_stocks(name: str, config: str) -> None:
    for ours, stock in zip(_for_each_sample(name, CONFIGS[config]), _for_each_sample(name, None), strict=True):
        assert (ours is None) == (stock is None)
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-6)


def test_large_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handing, "LARGE", 1)
    for ours, stock in zip(_for_each_sample("llama", "exact"), _for_each_sample("llama", None), strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-6)


def test_vectorised_jacobians_and_vmap() -> None:
    torch.manual_seed(0)
    stock = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 6), nn.GELU(), nn.Dropout(0.0), nn.Linear(6, 4))
    x, results = torch.randn(3, 8), []
    for model in (stock, patch_model(nn.Sequential(*stock))):
        jacobian = torch.autograd.functional.jacobian(model, x, vectorize=True)
        leaf = x.clone().requires_grad_()
        y = model(leaf).sum(0)

        def backward(dy: Tensor, y: Tensor = y, leaf: Tensor = leaf) -> Tensor:
            return torch.autograd.grad(y, leaf, dy, retain_graph=True)[0]

        results.append((jacobian, torch.func.vmap(backward)(torch.eye(4))))
    torch.testing.assert_close(*results)
