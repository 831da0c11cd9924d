"""memory_report: its bytes are the allocator's, its advice agrees with measurements, and the model is not changed."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model

from hf_actcompress import CompressionConfig, kept_bytes, memory_report, patch_model, patch_report
from hf_actcompress.errors import MeasurementError, MissingExtraError
from hf_actcompress.records import live_entries
from tests.slopes import VOCAB, bert, gpt2, llama

LENGTH = 48
BUILDS = {"bert": bert, "gpt2": gpt2, "llama": llama}


def build(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return BUILDS[name](2, 128, **options).to(torch.bfloat16).train()


def batch(padded: bool = False) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "labels": ids}
    if padded:
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][0, 40:] = 0
    return inputs


def advice(model: Any, inputs: dict[str, torch.Tensor] | None = None) -> dict[str, int]:
    """The bytes of each row of advice, by a word that only this row has."""
    report = memory_report(model, inputs or batch())
    keys = ("use_cache", "probabilities", "function", "mask", "adapters", "logits")
    return {next(key for key in keys if key in row.what): row.bytes for row in report.advice}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", BUILDS)
def test_both_totals_are_the_allocators(name, padded):
    model, inputs = build(name), batch(padded)
    report = memory_report(model, inputs)
    stock = kept_bytes(lambda: model(**inputs), "cpu")
    ours = kept_bytes(lambda: patch_model(model)(**inputs), "cpu")
    # the allocator also sees the loss, python numbers that became tensors (8 bytes), and constants of the graph
    assert report.stock_bytes == pytest.approx(stock, rel=0.001)
    assert report.patched_bytes == pytest.approx(ours, rel=0.001)
    assert report.patched_bytes < 0.7 * report.stock_bytes


def test_lora_total_is_the_allocators_too():
    model = get_peft_model(build("llama"), LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.05))
    report = memory_report(model, batch())
    assert report.stock_bytes == pytest.approx(kept_bytes(lambda: model(**batch()), "cpu"), rel=0.001)
    patch_model(model)
    assert report.patched_bytes == pytest.approx(kept_bytes(lambda: model(**batch()), "cpu"), rel=0.001)


def test_rows_name_the_module_and_the_role():
    rows = {row.module: row for row in memory_report(build("llama"), batch()).rows}
    norm = rows["model.layers.1.input_layernorm"]
    assert norm.role == "norm"
    # stock: x in fp32, the normalised x in bf16, rstd; ours: x in bf16 and rstd
    assert (norm.stock_bytes, norm.patched_bytes) == (6 * 2 * LENGTH * 128 + 4 * 2 * LENGTH, (2 * 128 + 4) * 2 * LENGTH)
    assert norm.patched_tensors == (f"bfloat16[2, {LENGTH}, 128]", f"float32[2, {LENGTH}, 1]")
    assert rows["model.layers.0.self_attn"].role == "attention"
    down = rows["model.layers.0.mlp.down_proj"]
    assert (down.role, down.stock_bytes, down.patched_bytes) == ("linear", 2 * 2 * LENGTH * 448, 0)
    assert rows[""].role == "loss"


def test_figure_per_token_and_layer():
    model = build("llama")
    report = memory_report(model, batch())
    deeper = kept_bytes(lambda: model(**batch()), "cpu")
    model.model.layers = model.model.layers[:1]
    slope = deeper - kept_bytes(lambda: model(**batch()), "cpu")
    assert report.hidden_size == 128
    assert report.layer_tokens == 2 * 2 * LENGTH
    assert report.stock_per_token_layer == pytest.approx(slope / (2 * LENGTH), rel=0.01)


def fingerprint(model: Any) -> list[Any]:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_always_called")
    attributes = ("forward", "actcompress", "actcompress_root")
    return [
        (type(m), m.training, [m.__dict__.get(a) for a in attributes], [dict(getattr(m, h)) for h in hooks])
        for m in model.modules()
    ]


@pytest.mark.parametrize("patch", [False, True])
def test_the_model_is_left_as_found(patch):
    model = build("bert")
    if patch:
        patch_model(model, CompressionConfig(loss_head=False))
    model(**batch()).loss.backward()
    model.bert.eval()
    grads = [p.grad.clone() if p.grad is not None else None for p in model.parameters()]
    before, state = fingerprint(model), copy.deepcopy(model.state_dict())
    rng = torch.get_rng_state()
    memory_report(model, batch())
    assert fingerprint(model) == before
    assert torch.equal(torch.get_rng_state(), rng)
    assert live_entries() == 0
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert (p.grad is None) == (grad is None)
        assert grad is None or torch.equal(p.grad, grad)
    if patch:
        assert patch_report(model).patched


def test_the_model_is_left_as_found_by_a_forward_that_fails():
    model = build("bert")
    before = fingerprint(model)
    with pytest.raises(MeasurementError, match="labels"):
        memory_report(model, {"input_ids": batch()["input_ids"]})
    with pytest.raises(IndexError):
        memory_report(model, {**batch(), "input_ids": batch()["input_ids"] + VOCAB})
    assert fingerprint(model) == before
    # no global hook is left either
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_stock_and_patched_model_give_the_same_rows():
    model = build("gpt2")
    rows = memory_report(model, batch()).rows
    assert memory_report(patch_model(model), batch()).rows == rows


def test_buffers_that_training_updates_are_restored():
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(8)
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            return self.linear(self.norm(x)).sum()

    model = Net().eval()
    report = memory_report(model, {"x": torch.randn(4, 8)})
    assert report.stock_bytes > 0
    assert model.norm.running_mean.abs().sum() == 0
    assert model.norm.num_batches_tracked == 0
    assert not model.training


def checkpoint(model: Any) -> Any:
    model.gradient_checkpointing_enable()
    return model


@pytest.mark.parametrize("patch", [False, True])
def test_gradient_checkpointing_shows_the_boundaries_and_says_so(patch):
    model = checkpoint(build("llama"))
    if patch:
        patch_model(model)
    report = memory_report(model, batch())
    boundaries = [row for row in report.rows if row.role == "checkpoint"]
    assert sum(row.patched_bytes for row in boundaries) >= 2 * 2 * LENGTH * 128 * 2
    assert any("checkpointing" in note for note in report.notes)
    # the input of each layer, and the RNG state
    assert report.patched_per_token_layer / 128 < 2 + 2 * 5056 / (2 * LENGTH * 128)
    assert not memory_report(build("llama"), batch()).notes


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_advice_on_the_cache_is_what_turning_it_off_saves(name):
    model = build(name, use_cache=True)
    off = kept_bytes(lambda: model(**batch(), use_cache=False), "cpu")
    on = kept_bytes(lambda: model(**batch()), "cpu")
    found = advice(model).get("use_cache", 0)
    assert found == pytest.approx(on - off, abs=64)
    assert "use_cache" not in advice(model, {**batch(), "use_cache": False})
    assert "use_cache" not in advice(build(name))


def test_the_cache_of_gpt2_costs_copies_of_k_and_v():
    assert advice(build("gpt2", use_cache=True))["use_cache"] == 2 * 2 * (2 * 2 * LENGTH * 128)


def test_advice_on_eager_attention():
    model = build("llama", attn_implementation="eager")
    # two heads, two layers: at least the bf16 probabilities
    assert advice(model)["probabilities"] >= 2 * (2 * 2 * LENGTH * LENGTH * 2)
    assert "probabilities" not in advice(patch_model(model))
    assert "probabilities" not in advice(build("llama"))


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_advice_on_a_mask_per_layer(name):
    model = build(name)
    # two layers have a copy each, and one copy would be enough
    assert advice(model, batch(padded=True))["mask"] == 2 * LENGTH * LENGTH * 2
    assert "mask" not in advice(model)
    assert "mask" not in advice(patch_model(model), batch(padded=True))


def test_advice_on_fp32_adapters():
    lora = LoraConfig(r=8, target_modules="all-linear")
    model = get_peft_model(build("llama"), lora)
    stock = advice(model)["adapters"]
    # seven adapters per layer, of inputs 128 (six) and 448 wide
    assert stock >= 2 * (6 * 128 + 448) * 4 * 2 * LENGTH
    # what is left is the output of each A, 8 wide
    assert advice(patch_model(model))["adapters"] == 2 * 7 * 8 * 4 * 2 * LENGTH
    narrow = get_peft_model(build("llama"), lora, autocast_adapter_dtype=False)
    assert "adapters" not in advice(narrow)


def test_advice_on_logits():
    logits = 2 * LENGTH * VOCAB * 2
    model = patch_model(build("llama"), CompressionConfig(logits=True))
    assert advice(model)["logits"] == logits
    assert "logits" not in advice(patch_model(model))


def test_advice_on_functional_dropout():
    options = {
        "vocab_size": VOCAB, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 256,
        "word_embed_proj_dim": 128, "attention_dropout": 0.0, "use_cache": False, "activation_dropout": 0.0,
    }  # fmt: skip
    model = hf.OPTForCausalLM(hf.OPTConfig(**options, dropout=0.1)).to(torch.bfloat16).train()
    # two in each layer; a CPU keeps the mask in the dtype of the activation
    assert advice(model)["function"] >= 2 * 2 * (2 * LENGTH * 128)
    leaves = CompressionConfig(plans=False)
    assert advice(patch_model(model, replace(leaves, net=False)))["function"] >= 2 * 2 * (2 * LENGTH * 128)
    assert "function" not in advice(patch_model(model, leaves)), "the net keeps bits"
    assert "function" not in advice(patch_model(model)), "a program draws the mask again"
    without = hf.OPTForCausalLM(hf.OPTConfig(**options, dropout=0.0)).to(torch.bfloat16).train()
    assert "function" not in advice(without)
    assert "function" not in advice(build("bert"))


def test_json_holds_rows_advice_and_totals():
    report = memory_report(build("gpt2", use_cache=True), batch())
    data = json.loads(report.to_json())
    assert data["stock_bytes"] == sum(row["stock_bytes"] for row in data["rows"])
    assert data["patched_bytes"] == report.patched_bytes
    assert {row["what"] for row in data["advice"]} == {row.what for row in report.advice}
    assert report.by_role()["activation"][0] == sum(r.stock_bytes for r in report.rows if r.role == "activation")


def test_print_is_plain_text_where_there_is_no_terminal(capsys):
    report = memory_report(build("gpt2"), batch())
    report.print()
    text = capsys.readouterr().out
    assert text.isascii()
    assert "transformer.h.*.mlp.act" in text
    # lines are wrapped at 80 columns
    assert " ".join(str(report).split()) in " ".join(text.split())


def test_plot_writes_a_picture(tmp_path):
    memory_report(build("gpt2"), batch()).plot(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_names_the_extra(monkeypatch, tmp_path):
    report = memory_report(build("gpt2"), batch())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"hf-actcompress\[plot\]"):
        report.plot(tmp_path / "memory.png")
