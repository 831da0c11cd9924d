"""LoRA in layers that run as programs: bits are those of the leaf path, and no more bytes are kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.config import resolve
from hf_actcompress.memory.measurement.allocator import kept_bytes
from tests.families import BY_NAME, differing, mode_of, step
from tests.programs.pairs import LEAVES, PROGRAMS, calls

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


def adapted(name: str, dtype: torch.dtype, wide: bool, config: CompressionConfig, **options: Any) -> Any:
    model = BY_NAME[name].build(dtype)
    torch.manual_seed(0)
    fixed = {"target_modules": TARGETS[name], "init_lora_weights": False, "fan_in_fan_out": name.startswith("gpt2")}
    lora = peft.LoraConfig(**{"r": 4, **fixed, **options})
    return patch_model(peft.get_peft_model(model, lora, autocast_adapter_dtype=wide), config)


@pytest.mark.daily(4)
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_the_same_bits_and_bytes(name: str, kind: str, mode: str) -> None:
    dtype, wide, of_step = MODES[mode]
    models = [adapted(name, dtype, wide, config, **KINDS[kind]) for config in (LEAVES, PROGRAMS)]
    batch = BY_NAME[name].make_batch("right")
    results = []
    for model in models:
        torch.manual_seed(1)
        results.append(step(model, batch, of_step))
    (loss, grads), (expected, wanted) = results
    assert torch.equal(loss, expected) and all(torch.equal(grads[name], x) for name, x in wanted.items())
    assert calls(models[1]) == [1, 1]
    with mode_of(of_step):
        kept = [kept_bytes(lambda model=model: model(**batch), "cpu") for model in models]  # type: ignore[misc]
    assert kept[1] <= kept[0]


@pytest.mark.parametrize("preset", ["exact", "int8", "int4"])
@pytest.mark.parametrize("rank", [32, 128, 256])
def test_adapters_wider_than_the_layer_that_is_tried(preset: str, rank: int) -> None:
    """The rank is larger than the layer's width, 32, or equal to it."""
    results, batch = [], BY_NAME["llama"].make_batch("right")
    for programs in (False, True):
        model = adapted("llama", torch.float32, False, replace(resolve(preset), programs=programs), r=rank)
        results.append(step(model, batch))
    assert calls(model) == [1, 1]
    (expected, wanted), (loss, grads) = results
    assert torch.equal(loss, expected) and not differing(grads, wanted)


def test_two_active_adapters() -> None:
    models = [adapted("llama", torch.float32, False, config) for config in (LEAVES, PROGRAMS)]
    for model in models:
        torch.manual_seed(2)
        model.add_adapter("other", peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))
        model.base_model.set_adapter(["default", "other"])
    configs = LEAVES, PROGRAMS
    patched = [patch_model(model, config) for model, config in zip(models, configs, strict=True)]
    batch = BY_NAME["llama"].make_batch("right")
    (loss, grads), (expected, wanted) = (step(model, batch) for model in patched)
    assert torch.equal(loss, expected) and all(torch.equal(grads[name], x) for name, x in wanted.items())
    assert calls(patched[1]) == [1, 1]


def test_adapters_that_come_after_patching_run_as_programs() -> None:
    """The next forward writes new programs for the layers."""
    models = [patch_model(BY_NAME["llama"].build(), config) for config in (LEAVES, PROGRAMS)]
    batch = BY_NAME["llama"].make_batch("right")
    for model in models:
        step(model, batch)
    for i, model in enumerate(models):
        torch.manual_seed(3)
        models[i] = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
    (loss, grads), (expected, wanted) = (step(model, batch) for model in models)
    assert torch.equal(loss, expected) and all(torch.equal(grads[name], x) for name, x in wanted.items())
    assert calls(models[1]) == [1, 1]


def test_layers_that_are_refused_draw_no_random_numbers() -> None:
    """The first forward with the adapters runs LoHa's own code to examine it, and that code draws."""
    states = []
    for config in (LEAVES, PROGRAMS):
        model = patch_model(BY_NAME["bert"].build(), config)
        torch.manual_seed(4)
        mixed = peft.PeftMixedModel(model, peft.LoraConfig(r=4, target_modules=["query"]), "default")
        mixed.add_adapter("other", peft.LoHaConfig(r=4, target_modules=["value"]))
        mixed.set_adapter(["default", "other"])
        mixed(**BY_NAME["bert"].make_batch())
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("what", ("disabled", "merged"))
def test_adapters_that_are_off(what: str) -> None:
    models = [adapted("llama", torch.float32, False, config) for config in (LEAVES, PROGRAMS)]
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
    """Its weights are written through `.data`, which no version counter sees, and the layer is computed again."""
    base = BY_NAME["llama"].build()
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    patch_model(model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loss = model.train()(**BY_NAME["llama"].make_batch()).loss
    model.merge_adapter()
    with pytest.raises(RuntimeError, match="an adapter was merged"):
        loss.backward()
