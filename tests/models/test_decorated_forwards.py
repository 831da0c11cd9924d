"""Forwards with decorators: copies of them keep these. transformers 5.24 has a decorator on each forward."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import update_wrapper, wraps
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

from hf_actcompress import CompressionConfig, ops, patch_model
from hf_actcompress.models import rope
from tests.families import BY_NAME, differing, step

LAYERS = 2


def counted(forward: Callable[..., Any], seen: list[Any]) -> Callable[..., Any]:
    @wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(self)
        return forward(self, *args, **kwargs)

    return wrapper


class Hiding:
    """A decorator whose function is in no closure."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.inner = forward
        update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def test_decorators_of_a_forward_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rotary embedding runs inside of the decorator, with the same bits."""
    decorated, rotated, function = list[Any](), list[Any](), ops.rope
    monkeypatch.setattr(ops, "rope", lambda *args: (rotated.append(args), function(*args))[1])
    forward = counted(modeling_llama.LlamaAttention.forward, decorated)
    kind = type("Decorated", (modeling_llama.LlamaAttention,), {"forward": forward})
    config = CompressionConfig(plans=False)
    model, batch = BY_NAME["llama"].build(), BY_NAME["llama"].make_batch()
    expected = step(patch_model(copy.deepcopy(model), config), batch)
    rotated.clear()
    for layer in model.model.layers:
        layer.self_attn.__class__ = kind
    loss, grads = step(patch_model(model, config), batch)
    assert len(rotated) == len(decorated) == LAYERS
    assert torch.equal(loss, expected[0]) and not differing(grads, expected[1])


def test_a_forward_that_its_decorator_does_not_hold_stays_stocks() -> None:
    kind = type("Attention", (nn.Module,), {"forward": Hiding(inspect.unwrap(modeling_llama.LlamaAttention.forward))})
    assert rope.calls_rope(kind) and "decorator" in str(rope.why_stock(kind))
