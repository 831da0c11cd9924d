"""Gradients of chosen tokens: against stock models in which the hidden states of the other tokens are detached."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import Trainer, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_actcompress import CompressionConfig, estimate, kept_bytes, memory_report, patch_model, unpatch_model
from tests.families import BY_NAME, differing, step
from tests.slopes import llama, slope

SHARE = 0.3
# the modules that compute q, k and v
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "query", "key", "value", "c_attn", "query_key_value", "Wqkv", "qkv_proj",
               "q_norm", "k_norm")  # fmt: skip


def scores_of(batch: dict[str, Any]) -> Tensor:
    return torch.rand(batch["input_ids"].shape, generator=torch.Generator().manual_seed(7))


def chosen(batch: dict[str, Any], share: float = SHARE) -> Tensor:
    """bool [B, S, 1]: the tokens with the largest scores that are no padding."""
    scores = scores_of(batch)
    if "attention_mask" in batch:
        scores = scores.masked_fill(batch["attention_mask"] == 0, -math.inf)
    rows = scores.topk(math.ceil(share * scores.size(1))).indices
    return torch.zeros_like(scores).scatter(1, rows, 1.0).bool()[..., None]


def with_stops(model: nn.Module, keep: Tensor) -> nn.Module:
    """The oracle: a stock model whose layer inputs and outputs, q, k and v are constants except in the rows `keep`."""

    def stop(y: Tensor) -> Tensor:
        return torch.where(keep if y.dim() == 3 else keep[..., None], y, y.detach())

    def stopped_result(_: nn.Module, args: Any, y: Any) -> Any:
        return (stop(y[0]), *y[1:]) if isinstance(y, tuple) else stop(y)

    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.register_forward_pre_hook(lambda _, args: (stop(args[0]), *args[1:]))
            module.register_forward_hook(stopped_result)
        elif name.rpartition(".")[2] in PROJECTIONS:
            module.register_forward_hook(stopped_result)
    return model


def config(preset: str = "exact", share: float = SHARE, **options: Any) -> CompressionConfig:
    choice = {"token_choice": lambda inputs: scores_of(inputs), **options}
    return CompressionConfig.from_preset(preset, tokens=share, **choice)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, x in expected.items():
        assert (found[name] - x).norm() <= 1e-5 * x.norm() + 1e-9, name


CASES = [
    *((name, padding) for name in ("llama", "bert", "gpt2-gelu-tanh") for padding in ("none", "left", "right")),
    ("modernbert", "right"), ("qwen3", "none"), ("gemma", "left"), ("phi3", "none"), ("mistral", "left"),
]  # fmt: skip


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(("name", "padding"), CASES)
def test_the_gradients_are_those_of_the_chosen_tokens(name: str, padding: str, checkpointed: bool) -> None:
    family = BY_NAME[name]
    model, batch = family.build(torch.float32), family.make_batch(padding)
    ours = copy.deepcopy(model)
    if checkpointed:
        ours.gradient_checkpointing_enable({"use_reentrant": False})
    patch_model(ours, config())
    loss, grads = step(ours, batch)
    expected_loss, expected = step(with_stops(model, chosen(batch)), batch)
    assert torch.allclose(loss, expected_loss, rtol=1e-6)
    assert_close(grads, expected)
    # a second step chooses tokens again
    assert_close(step(ours, batch)[1], expected)


def test_adapters_and_frozen_weights() -> None:
    peft = pytest.importorskip("peft")
    family = BY_NAME["llama"]
    batch = family.make_batch("left")
    settings = peft.LoraConfig(r=4, target_modules=["o_proj", "down_proj", "gate_proj"], init_lora_weights=False)
    model = peft.get_peft_model(family.build(torch.float32), settings)
    ours = patch_model(copy.deepcopy(model), config())
    # only adapters are trained, and they use the chosen rows of their layers
    assert_close(step(ours, batch)[1], step(with_stops(model, chosen(batch)), batch)[1])


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_adapters_of_queries_keys_and_values_alone(name: str, padding: str) -> None:
    """Keys and values are computed for all tokens, but gradients reach their adapters only through the chosen rows."""
    peft = pytest.importorskip("peft")
    family = BY_NAME[name]
    batch = family.make_batch(padding)
    targets = ["q_proj", "k_proj", "v_proj", "query", "key", "value"]
    settings = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(family.build(torch.float32), settings)
    ours = patch_model(copy.deepcopy(model), config())
    expected = step(with_stops(model, chosen(batch)), batch)[1]
    assert len(expected) >= 2 * 3 * 2 and all("lora" in key for key in expected)
    assert_close(step(ours, batch)[1], expected)
    kept = {}
    for share in (1.0, SHARE):
        patched = patch_model(copy.deepcopy(ours), config(share=share))
        kept[share] = kept_bytes(lambda patched=patched: patched(**batch).loss, "cpu")
    assert kept[SHARE] < kept[1.0]


def test_bf16_autocast_and_a_codec() -> None:
    family = BY_NAME["llama"]
    model, batch = family.build(torch.float32), family.make_batch("left")
    stock = with_stops(copy.deepcopy(model), chosen(batch))
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(stock, batch)[1]
        for preset, limit in (("exact", 0.02), ("int8", 0.06)):
            found = step(patch_model(copy.deepcopy(model), config(preset)), batch)[1]
            error = sum((found[k] - x).norm() ** 2 for k, x in expected.items())
            assert error**0.5 <= limit * sum(x.norm() ** 2 for x in expected.values()) ** 0.5


def test_packed_rows() -> None:
    model = BY_NAME["llama"].build(torch.float32)
    ids = torch.randint(3, 60, (1, 13), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.cat([torch.arange(5), torch.arange(8)])[None]}
    ours = patch_model(copy.deepcopy(model), config())
    assert_close(step(ours, batch)[1], step(with_stops(model, chosen(batch)), batch)[1])


def test_a_trainer(tmp_path: Path) -> None:
    """The last tokens are the same in every batch, so that the oracle's stops stay where they are."""
    family = BY_NAME["llama"]
    rows = [{k: v[i] for k, v in family.make_batch("none", seed).items()} for seed in range(4) for i in range(3)]
    tokens = rows[0]["input_ids"].numel()
    last = torch.arange(tokens) >= tokens - math.ceil(SHARE * tokens)
    options = {
        "output_dir": str(tmp_path), "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "max_steps": 4,
        "logging_steps": 1, "report_to": "none", "use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2,
        "save_strategy": "no", "dataloader_pin_memory": False,
    }  # fmt: skip
    losses = []
    for model in (
        patch_model(family.build(torch.float32), CompressionConfig(tokens=SHARE, token_choice="last")),
        with_stops(family.build(torch.float32), last.view(1, -1, 1)),
        family.build(torch.float32),
    ):
        trainer = Trainer(model=model, args=TrainingArguments(**options), train_dataset=rows)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 4 and losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] != pytest.approx(losses[2][-1], rel=1e-3)


@pytest.mark.parametrize("whole", [True, False])
def test_compiled_models_run_in_eager_mode(whole: bool) -> None:
    family = BY_NAME["llama"]
    model, batch = family.build(torch.float32), family.make_batch("left")
    expected = step(with_stops(copy.deepcopy(model), chosen(batch)), batch)[1]
    patch_model(model, config())
    if whole:
        model.compile(backend="aot_eager")
    else:
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
    assert_close(step(model, batch)[1], expected)


def test_estimates_and_reports() -> None:
    model = BY_NAME["llama"].build(torch.float32).train()
    ids = torch.randint(3, 60, (2, 40))
    batch, options = {"input_ids": ids, "labels": ids}, CompressionConfig(tokens=SHARE)
    found = estimate(model, batch_size=2, seq_len=40, config=options, device="cpu")
    report = memory_report(copy.deepcopy(model), batch, options)
    assert "checkpointing" not in str(report)
    patch_model(model, options)
    step(model, batch)
    kept = kept_bytes(lambda: model(**batch), "cpu")
    assert found.kept_bytes == pytest.approx(kept, rel=0.01)
    assert sum(row.patched_bytes for row in report.rows) == pytest.approx(kept, rel=0.1)


def test_all_tokens_are_the_preset() -> None:
    family = BY_NAME["llama"]
    model, batch = family.build(torch.float32), family.make_batch("left")
    for share in (1.0, 0.99):
        # 0.99 of 13 tokens, rounded up, are all; a step whose tokens are chosen runs module by module
        expected = step(patch_model(copy.deepcopy(model), CompressionConfig(plans=share == 1.0)), batch)
        found = step(patch_model(copy.deepcopy(model), config(share=share)), batch)
        assert torch.equal(found[0], expected[0]) and not differing(found[1], expected[1])


def test_without_gradients_and_unpatched_it_is_stock() -> None:
    family = BY_NAME["llama"]
    model, batch = family.build(torch.float32), family.make_batch()
    expected = model(**batch).logits.detach()
    kinds = [(type(m), sorted(m.__dict__)) for m in model.modules()]
    patch_model(model, config())
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, expected)
    step(model, batch)
    model.zero_grad()
    unpatch_model(model)
    assert [(type(m), sorted(m.__dict__)) for m in model.modules()] == kinds


@pytest.mark.daily(2)
@pytest.mark.parametrize(
    ("preset", "limit"), (("exact", 7.65), ("int8", 4.1), ("int4", 2.71), ("int4_attention", 2.35)), ids=str
)
def test_kept_bytes(preset: str, limit: float) -> None:
    """Bytes per token and layer in units of the hidden size, in bf16.

    A layer keeps the chosen tokens, and keys and values of all tokens. All layers share the rows of the rotary angles,
    so these are not part of the figure.
    """
    options = CompressionConfig.from_preset(preset, tokens=SHARE)
    found = slope(llama, prepare=lambda model: patch_model(model, options), length=256, peak=True)
    assert found.kept <= limit and found.peak <= limit + 0.05


def test_products() -> None:
    """A step computes all tokens once, and the chosen ones forward and backward: 1 + 3 * 0.3 forwards instead of 3."""
    counts = []
    for options in (CompressionConfig(), CompressionConfig(tokens=SHARE)):
        model, ids = patch_model(llama(2, 128, 64), options), torch.randint(3, 60, (1, 100))
        step(model, {"input_ids": ids, "labels": ids})
        with FlopCounterMode(display=False) as counted:
            step(model, {"input_ids": ids, "labels": ids})
        counts.append(counted.get_total_flops())
    print(counts[1] / counts[0])
    assert counts[1] <= 0.7 * counts[0]
