"""Weights whose gradients are handed on one by one: the peak of a backward is not that of a program's gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.memory.measurement.allocator import trace
from hf_actcompress.programs import handing, stages
from tests.programs.pairs import LEAVES, PROGRAMS, calls

HIDDEN = 256


def llama(config: CompressionConfig) -> Any:
    torch.manual_seed(0)
    options = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 32, "use_cache": False}
    return patch_model(
        LlamaForCausalLM(LlamaConfig(hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, **options)), config
    )


def batch(tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 32, (1, tokens), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def hooked(model: Any) -> None:
    def use_up(p: Any) -> None:
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(use_up)


def accumulated(model: Any) -> None:
    model(**batch(8)).loss.backward()


CASES: dict[str, Callable[[Any], None]] = {"in the second backward": accumulated, "hooks on the weights": hooked}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tokens", (8, 400))
def test_the_peak_is_that_of_the_leaf_path(case: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "SLACK", 2**16)
    peaks, gradients = [], []
    models = llama(LEAVES), llama(PROGRAMS)
    for model in models:
        CASES[case](model)
        loss = model(**batch(tokens)).loss
        peaks.append(trace(loss.backward).peak_bytes)
        gradients.append([p.grad for p in model.parameters()])
    # norms and small products may come together
    assert peaks[1] <= peaks[0] + 4 * max(stages.SLACK, 4 * tokens * HIDDEN)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert calls(models[1])[0] > 1 - (case != "in the second backward")


def test_gradients_of_heads_are_let_go_of_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of a first backward is the leaf path's. Small ones are held together, which is faster."""
    tokens, peaks = 100, []
    for slack, config in ((0, LEAVES), (0, PROGRAMS), (2**40, PROGRAMS)):
        monkeypatch.setattr(handing, "LARGE", slack)
        model = llama(config)
        model(**batch(tokens))
        peaks.append(trace(lambda model=model: model(**batch(tokens)).loss.backward()).peak_bytes)  # type: ignore[misc]
    one = 4 * tokens * HIDDEN
    assert peaks[1] < peaks[0] + one / 4 and peaks[2] > peaks[1] + one / 2


def test_two_backwards_through_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "SLACK", 0)
    gradients = []
    for config in (LEAVES, PROGRAMS):
        model = llama(config)
        accumulated(model)
        loss = model(**batch(8)).loss
        loss.backward(retain_graph=True)
        loss.backward()
        wanted = list(model.parameters())
        again = torch.autograd.grad(model(**batch(8)).loss, wanted)
        gradients.append([*(p.grad for p in wanted), *again])
    assert all(map(torch.equal, *gradients))
