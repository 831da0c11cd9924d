"""LoRA in layers that run by plans: bits are stock's, and no more bytes are kept than module by module."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.config import resolve
from hf_actcompress.memory.measurement.allocator import kept_bytes
from tests.families import BY_NAME, mode_of, relative_error, step
from tests.layers.plans import LEAVES, PLANS, assert_same, calls, patched
from tests.oracle import EXACT

peft = pytest.importorskip("peft")
TARGETS: dict[str, Any] = {
    "llama": "all-linear", "gpt2-gelu-new": ["c_attn", "c_proj", "c_fc"], "bert": "all-linear",
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "dropout": {"lora_dropout": 0.1}, "rank-stabilised": {"use_rslora": True},
    "dora": {"use_dora": True}, "dora with dropout": {"use_dora": True, "lora_dropout": 0.1},
}  # fmt: skip
# the dtype of the base weights, whether adapters are in fp32, and the mode of the step
MODES = {
    "fp32": (torch.float32, False, "fp32"),
    "bf16": (torch.bfloat16, False, "bf16"),
    "bf16 with fp32 adapters": (torch.bfloat16, True, "bf16"),
    "autocast": (torch.float32, False, "autocast"),
    "bf16 with fp32 adapters under autocast": (torch.bfloat16, True, "autocast"),
}


def adapted(name: str, dtype: torch.dtype, wide: bool, config: CompressionConfig | None, **options: Any) -> Any:
    model = BY_NAME[name].build(dtype)
    torch.manual_seed(0)
    fixed = {"target_modules": TARGETS[name], "init_lora_weights": False, "fan_in_fan_out": name.startswith("gpt2")}
    lora = peft.LoraConfig(**{"r": 4, **fixed, **options})
    return patched(peft.get_peft_model(model, lora, autocast_adapter_dtype=wide), config)


@pytest.mark.daily(4)
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_the_same_bits_and_bytes(name: str, kind: str, mode: str) -> None:
    dtype, wide, of_step = MODES[mode]
    stock, plans, leaves = (adapted(name, dtype, wide, config, **KINDS[kind]) for config in (None, PLANS, LEAVES))
    batch = BY_NAME[name].make_batch("right")
    assert_same(plans, stock, batch, of_step)
    assert calls(plans) == [1, 1]
    with mode_of(of_step):
        kept = [kept_bytes(lambda model=model: model(**batch), "cpu") for model in (plans, leaves)]  # type: ignore[misc]
    # of the first norm, to whose input no gradient goes, a plan keeps the input and a statistic, and not the output
    statistics = 4 * batch["input_ids"].numel()
    assert kept[0] <= kept[1] + statistics


@pytest.mark.parametrize("rank", [32, 128, 256])
def test_adapters_as_wide_as_the_layer(rank: int) -> None:
    """The rank is larger than the layer's width, 32, or equal to it."""
    stock, plans = (adapted("llama", torch.float32, False, config, r=rank) for config in (None, PLANS))
    assert_same(plans, stock, BY_NAME["llama"].make_batch("right"))
    assert calls(plans) == [1, 1]


@pytest.mark.parametrize("preset", ["int8", "int4"])
@pytest.mark.parametrize("rank", [4, 32, 256])
def test_codecs_have_no_larger_error_than_module_by_module(preset: str, rank: int) -> None:
    batch, config = BY_NAME["llama"].make_batch("right"), resolve(preset)
    # in fp32, stock's own error is thousands of times smaller than a codec's
    expected, wanted = step(adapted("llama", torch.float32, False, None, r=rank), batch)
    oracle, errors = {name: x.double() for name, x in wanted.items()}, []
    for plans in (False, True):
        model = adapted("llama", torch.float32, False, replace(config, plans=plans), r=rank)
        loss, grads = step(model, batch)
        assert torch.equal(loss, expected) and grads.keys() == wanted.keys()
        errors.append(relative_error(grads, oracle))
    assert calls(model) == [1, 1]
    assert errors[1] <= EXACT * errors[0]


@pytest.mark.parametrize("preset", ["int8", "int4"])
def test_codecs_keep_no_more_bytes_than_module_by_module(preset: str) -> None:
    batch, kept = BY_NAME["llama"].make_batch("right"), []
    for plans in (False, True):
        model = adapted("llama", torch.float32, False, replace(resolve(preset), plans=plans))
        kept.append(kept_bytes(lambda model=model: model(**batch), "cpu"))  # type: ignore[misc]
    # the first layer's input, which wants no gradient, is kept as it is, once per model
    assert kept[1] <= kept[0] + batch["input_ids"].numel() * 3 * 32


def test_two_active_adapters() -> None:
    models = [adapted("llama", torch.float32, False, config) for config in (None, PLANS)]
    for model in models:
        torch.manual_seed(2)
        model.add_adapter("other", peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))
        model.base_model.set_adapter(["default", "other"])
    models[1] = patch_model(models[1], PLANS)
    batch = BY_NAME["llama"].make_batch("right")
    assert_same(models[1], models[0], batch)
    assert calls(models[1]) == [1, 1]


def test_adapters_that_come_after_patching_run_by_plans() -> None:
    """The next forward writes new plans for the layers."""
    models = [patched(BY_NAME["llama"].build(), config) for config in (None, PLANS)]
    batch = BY_NAME["llama"].make_batch("right")
    for model in models:
        step(model, batch)
    for i, model in enumerate(models):
        torch.manual_seed(3)
        models[i] = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
    assert_same(models[1], models[0], batch)
    assert calls(models[1]) == [2, 2]


def test_layers_that_are_refused_draw_no_random_numbers() -> None:
    """The first forward with the adapters runs LoHa's own code to examine it, and that code draws."""
    states = []
    for config in (None, PLANS):
        model = patched(BY_NAME["bert"].build(), config)
        torch.manual_seed(4)
        mixed = peft.PeftMixedModel(model, peft.LoraConfig(r=4, target_modules=["query"]), "default")
        mixed.add_adapter("other", peft.LoHaConfig(r=4, target_modules=["value"]))
        mixed.set_adapter(["default", "other"])
        mixed(**BY_NAME["bert"].make_batch())
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("what", ("disabled", "merged"))
def test_adapters_that_are_off(what: str) -> None:
    models = [adapted("llama", torch.float32, False, config) for config in (None, PLANS)]
    batch = BY_NAME["llama"].make_batch("right")
    losses = []
    for model in models:
        model.get_input_embeddings().weight.requires_grad_()
        if what == "merged":
            model.base_model.merge_adapter()
        else:
            model.base_model.disable_adapter_layers()
        loss = model(**batch).loss
        loss.backward()
        losses.append((loss.detach(), model.get_input_embeddings().weight.grad))
    assert all(map(torch.equal, *losses))


def test_an_adapter_that_is_merged_before_a_checkpointed_backward_raises() -> None:
    """Its weights are written through `.data`, which no version counter sees, and the layer is recomputed."""
    base = BY_NAME["llama"].build()
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    patch_model(model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loss = model.train()(**BY_NAME["llama"].make_batch()).loss
    model.merge_adapter()
    with pytest.raises(RuntimeError, match="an adapter was merged"):
        loss.backward()
