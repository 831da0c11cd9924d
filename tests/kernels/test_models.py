"""Patched models that run on the kernels: the loss is stock's, and gradients are within the law."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.dispatch import use
from tests.families import BODY, BY_NAME, Batch, Family, build, oracle_step, relative_error, step
from tests.kernels.harness import DEVICE, launched
from tests.layers.plans import calls
from tests.oracle import EXACT

pytestmark = pytest.mark.daily(6)

# LayerNorm, a composed activation, RMSNorm and gates
NAMES = ("bert", "gpt2-gelu-new", "llama", "gemma")


def on_device(family: Family, mode: str, seed: int) -> tuple[Any, Batch]:
    batch = {name: x.to(DEVICE) for name, x in family.make_batch("right", seed).items()}
    return build(family, mode, seed=seed).to(DEVICE), batch


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_loss_and_gradients(name: str, mode: str) -> None:
    family = BY_NAME[name]
    own = error = 0.0
    # the ratio of one run scatters by more than the law allows
    for seed in range(3):
        model, batch = on_device(family, mode, seed)
        oracle = oracle_step(model, batch)
        stock_loss, stock = step(model, batch, mode)
        with use("triton"):
            loss, ours = step(patch_model(model, BODY), batch, mode)
        assert torch.equal(loss, stock_loss)
        own += relative_error(stock, oracle) ** 2
        error += relative_error(ours, oracle) ** 2
    assert error**0.5 <= EXACT * own**0.5


# which kernels are launched for the activation of each layer's MLP, and how often
PASSES = {
    "llama": {"_fwd_kernel": 1, "_bwd_kernel": 1, "_product_kernel": 0},
    # `_fwd_kernel` runs again for the rebuilt result, and `_activation_kernel` for dx
    "gpt2-gelu-new": {"_fwd_kernel": 2, "_activation_kernel": 1},
}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", PASSES)
def test_passes_over_an_mlp(name: str, checkpointed: bool) -> None:
    """Layers run by plans. A gated MLP's product is recomputed in backward by the kernel of its gradients."""
    model, batch = on_device(BY_NAME[name], "bf16", 0)
    batch = {key: x[:1, :6] for key, x in batch.items()}
    layers = model.config.num_hidden_layers
    patch_model(model, BODY)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with use("triton"):
        # the first step writes the plans' code and tries the forms of activations
        expected = step(model, batch, "bf16")
        with launched() as launches:
            loss, gradients = step(model, batch, "bf16")
    counts = Counter(name for name, _ in launches)
    # a checkpointed layer's second forward does not compute what its backward computes again
    assert {kernel: counts[kernel] for kernel in PASSES[name]} == {k: n * layers for k, n in PASSES[name].items()}
    assert torch.equal(loss, expected[0])
    assert all(torch.equal(gradients[name], expected[1][name]) for name in gradients)


def test_tiles_of_a_checkpointed_layer_with_adapters() -> None:
    """Adapters are in fp32, so that a norm's input is made twice in backward: for the tiles, and for its gradient."""
    base, batch = on_device(BY_NAME["llama"], "bf16", 0)
    model: Any = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    ours = patch_model(copy.deepcopy(model), CompressionConfig(tiled_mlp=8))
    with use("triton"):
        loss, expected = step(patch_model(model, BODY), batch, "bf16")
        found = step(ours, batch, "bf16")
    assert torch.equal(found[0], loss) and set(calls(ours)) == {1}
    # one rounding of bf16
    assert relative_error(found[1], expected) < 2**-8


def test_twice_the_same() -> None:
    model, batch = on_device(BY_NAME["llama"], "bf16", 0)
    patch_model(model)
    with use("triton"):
        first, second = (step(model, batch, "bf16")[1] for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
