"""Losses outside of the model that are compiled, while the model is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_actcompress import CompressionConfig, patch_model
from tests.families import BY_NAME

TARGETS = torch.arange(3 * 13).view(3, 13) % 60


def _entropy(x: Tensor) -> Tensor:
    return (torch.logsumexp(x, -1) - (x.softmax(-1) * x).sum(-1)).mean()


def _cross_entropy(x: Tensor) -> Tensor:
    return F.cross_entropy(x.flatten(0, 1).float(), TARGETS.flatten())


def _log_probabilities(x: Tensor) -> Tensor:
    return x.log_softmax(-1).gather(-1, TARGETS[..., None]).exp().mean()


def _shifted(x: Tensor) -> Tensor:
    return F.cross_entropy(x[:, :-1].mT, TARGETS[:, 1:])


@pytest.mark.parametrize("logits", [True, False])
@pytest.mark.parametrize("loss", [_entropy, _cross_entropy, _log_probabilities, _shifted])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_loss_has_stocks_gradients(loss: Callable[[Tensor], Tensor], backend: str, logits: bool) -> None:
    results: list[dict[str, Any]] = []
    for patched in (False, True):
        torch._dynamo.reset()
        model = BY_NAME["llama"].build()
        if patched:
            patch_model(model, CompressionConfig(logits=logits))
        batch = BY_NAME["llama"].make_batch()
        compiled = torch.compile(loss, backend=backend)
        compiled(model(input_ids=batch["input_ids"]).logits).backward()
        results.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
