"""Layers with codecs by plans: the loss is stock's, gradients have no larger error than module by module, and no more
bytes are kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.config import resolve
from hf_actcompress.memory.measurement.allocator import kept_bytes
from tests.families import BY_NAME, Batch, Gradients, cast_batch, mode_of, oracle_step, relative_error, step
from tests.layers.plans import DTYPES, MODES, calls

PRESETS = ("int8", "int4", "fp8")
FAMILIES = ("llama", "bert", "gpt2-gelu-new", "gemma", "vit", "qwen3", "modernbert", "phi3", "opt")
# the ratio of one run scatters by more than the law allows
SEEDS = 3
Step = Callable[[Any, Batch], tuple[torch.Tensor, Gradients]]


# measured: 1.18 for Qwen3 with int8, 1.13 with fp8, BERT 1.11
MORE = 1.2


def both(model: Any, config: CompressionConfig) -> list[Any]:
    """Two patched copies of a model: one that runs module by module, and one that runs by plans."""
    return [patch_model(copy.deepcopy(model), replace(config, plans=plans)) for plans in (False, True)]


def assert_no_larger_error(
    build: Callable[[int], Any], config: CompressionConfig, name: str, take: Step = step, oracle: Step | None = None
) -> None:
    """The loss is stock's. The gradients by plans have at most `MORE` times the error of those module by module.

    Plans round the same activations as modules do, and keep fewer of them: the statistics of a LayerNorm, or of a norm
    of queries and keys, are those of the rounded input, where modules keep exact ones.
    Without an oracle it is the stock model in fp32, whose own error is thousands of times smaller than a codec's.
    """
    family, errors = BY_NAME[name], [0.0, 0.0]
    for seed in range(SEEDS):
        stock, batch = build(seed), family.make_batch(family.paddings[-1], seed)
        expected, gradients = take(stock, batch)
        if oracle is not None:
            gradients = oracle(stock, batch)[1]
        wanted = {n: x.double() for n, x in gradients.items()}
        for i, model in enumerate(both(stock, config)):
            loss, grads = take(model, batch)
            assert torch.equal(loss, expected) and grads.keys() == wanted.keys()
            errors[i] += relative_error(grads, wanted) ** 2
        assert calls(model) and min(calls(model)) > 0
    assert errors[1] ** 0.5 <= MORE * errors[0] ** 0.5, f"{(errors[1] / errors[0]) ** 0.5:.3f} times the error"


@pytest.mark.daily(4)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_stocks_loss_and_no_larger_error(preset: str, name: str, mode: str) -> None:
    assert_no_larger_error(
        lambda seed: BY_NAME[name].build(DTYPES[mode], seed=seed), resolve(preset), name,
        take=lambda model, batch: step(model, batch, mode),
        oracle=lambda model, batch: (torch.zeros(()), oracle_step(model, batch)),
    )  # fmt: skip


@pytest.mark.daily(4)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_no_more_bytes(preset: str, name: str, mode: str) -> None:
    family, dtype, kept = BY_NAME[name], DTYPES[mode], []
    batch = cast_batch(family.make_batch(family.paddings[-1]), dtype)
    for model in both(family.build(dtype), resolve(preset)):
        with mode_of(mode):
            kept.append(kept_bytes(lambda model=model: model(**batch), "cpu"))  # type: ignore[misc]
    assert set(calls(model)) == {1}
    # one product makes q, k and v: the plan keeps it whole, because v is a part of it, beside rotated q and k
    assert kept[1] <= (1.11 if name in ("phi3", "modernbert") else 1.0) * kept[0]


def with_dropout_in_attention(name: str, seed: int) -> Any:
    model = BY_NAME[name].build(seed=seed)
    for module in model.modules():
        for rate in ("p", "dropout_prob", "attention_dropout", "attn_dropout", "dropout"):
            if type(getattr(module, rate, None)) is float:
                setattr(module, rate, 0.1)
    return model


@pytest.mark.parametrize("name", ["bert", "gpt2-gelu-new", "llama", "opt", "vit"])
def test_dropout_in_attention(name: str) -> None:
    """Attention then runs again in backward and does not keep its output. The linear layer after it does."""
    assert_no_larger_error(lambda seed: with_dropout_in_attention(name, seed), resolve("int8"), name)
    batch, kept = BY_NAME[name].make_batch(), []
    for model in both(with_dropout_in_attention(name, 0), resolve("int8")):
        kept.append(kept_bytes(lambda model=model: model(**batch), "cpu"))  # type: ignore[misc]
    # for two dropout calls in the own code of each of OPT's layers, a plan keeps a mask in bytes, the leaf path in bits
    masks = 4 * 7 / 8 * batch["input_ids"].numel() * 32 if name == "opt" else 0
    assert kept[1] <= 1.02 * kept[0] + masks


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_two_backwards(name: str) -> None:
    """A second backward through one graph reads the same packed activations."""
    batch = BY_NAME[name].make_batch()
    model = patch_model(BY_NAME[name].build(), resolve("int8"))
    _, once = step(model, batch)
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    loss.backward()
    assert set(calls(model)) == {2}
    assert all(torch.equal(p.grad, 2 * once[n]) for n, p in model.named_parameters() if p.grad is not None)


def test_a_checkpointed_step() -> None:
    """The second run of a checkpointed layer keeps its activations through the codecs, as module by module."""

    def checkpointed(model: Any, batch: Batch) -> tuple[torch.Tensor, Gradients]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return step(model, batch)

    assert_no_larger_error(lambda seed: BY_NAME["bert"].build(seed=seed), resolve("int8"), "bert", checkpointed)


def test_a_codec_in_one_layer_alone() -> None:
    """The layer after it reads what this layer keeps."""
    config = CompressionConfig(overrides=(("layers.0", "norm", "int8"), ("layers.0", "mlp", "int4")))
    assert_no_larger_error(lambda seed: BY_NAME["llama"].build(seed=seed), config, "llama")
