"""Layers with codecs as programs: bits are those of the leaf path, and no more bytes are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.config import resolve
from hf_actcompress.memory.measurement.allocator import kept_bytes
from tests.families import BY_NAME, cast_batch, mode_of, step
from tests.programs.pairs import DTYPES, MODES, calls

PRESETS = ("int8", "int4", "fp8")
FAMILIES = ("llama", "bert", "gpt2-gelu-new", "gemma", "vit", "qwen3", "modernbert", "phi3", "opt")


@pytest.mark.daily(4)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_the_same_bits_and_bytes(preset: str, name: str, mode: str) -> None:
    config, family, dtype = resolve(preset), BY_NAME[name], DTYPES[mode]
    batch, results, kept = family.make_batch(family.paddings[-1]), [], []
    for programs in (False, True):
        model = patch_model(family.build(dtype).train(), replace(config, programs=programs))
        results.append(step(model, batch, mode))
        with mode_of(mode):
            kept.append(kept_bytes(lambda model=model: model(**cast_batch(batch, dtype)), "cpu"))  # type: ignore[misc]
    assert set(calls(model)) == {2}
    (expected, wanted), (loss, grads) = results
    assert torch.equal(loss, expected) and all(torch.equal(grads[n], x) for n, x in wanted.items())
    assert kept[1] <= kept[0]


@pytest.mark.parametrize("name", ["bert", "gpt2-gelu-new", "llama", "opt", "vit"])
def test_dropout_in_attention(name: str) -> None:
    """Attention then runs again in backward and does not keep its output. The linear layer after it does."""
    family, results, kept = BY_NAME[name], [], []
    batch = family.make_batch()
    for programs in (False, True):
        model = family.build(torch.float32).train()
        for module in model.modules():
            for rate in ("p", "dropout_prob", "attention_dropout", "attn_dropout", "dropout"):
                if type(getattr(module, rate, None)) is float:
                    setattr(module, rate, 0.1)
        patch_model(model, replace(resolve("int8"), programs=programs))
        torch.manual_seed(3)
        results.append(step(model, batch))
        kept.append(kept_bytes(lambda model=model: model(**batch), "cpu"))  # type: ignore[misc]
    assert set(calls(model)) == {2}
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(results[1][1][n], x) for n, x in results[0][1].items())
    # for a dropout call in OPT's own code, a program keeps the generator's state, and the leaf path a mask in bits
    states = 4 * torch.get_rng_state().numel() if name == "opt" else 0
    assert kept[1] <= 1.02 * kept[0] + states


def test_two_backwards_and_a_checkpointed_step() -> None:
    """The second run of a checkpointed layer keeps its activations through the codecs, as module by module."""
    batch, results = BY_NAME["bert"].make_batch(), []
    for programs in (False, True):
        model = patch_model(BY_NAME["bert"].build(torch.float32), replace(resolve("int8"), programs=programs))
        loss = model(**batch).loss
        loss.backward(retain_graph=True)
        loss.backward()
        once = [p.grad for p in model.parameters()]
        model.gradient_checkpointing_enable({"use_reentrant": False})
        results.append([*once, *step(model, batch)[1].values()])
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_codec_in_one_layer_alone() -> None:
    """The layer after it reads what this layer keeps."""
    config = CompressionConfig(overrides=(("layers.0", "norm", "int8"), ("layers.0", "mlp", "int4")))
    results = []
    for programs in (False, True):
        model = patch_model(BY_NAME["llama"].build(torch.float32), replace(config, programs=programs))
        results.append(step(model, BY_NAME["llama"].make_batch("right")))
    assert calls(model) == [1, 1]
    (expected, wanted), (loss, grads) = results
    assert torch.equal(loss, expected) and all(torch.equal(grads[n], x) for n, x in wanted.items())
