"""LoRA and other methods of PEFT, added before or after patching, against stock PEFT."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, TaskType, get_peft_model
from torch import nn

from hf_actcompress import memory_report, patch_model, patch_report, unpatch_model
from hf_actcompress.modules.adapter import AdapterMixin
from hf_actcompress.modules.base import PatchedModule
from tests.families import BODY, BY_NAME, differing, step

BF16 = torch.bfloat16
NAMES = ("llama", "gpt2-gelu-tanh", "bert")
named = pytest.mark.parametrize("name", NAMES)
orders = pytest.mark.parametrize("order", ["patch, lora", "lora, patch"])
TASKS = {"llama": "CAUSAL_LM", "gpt2-gelu-tanh": "CAUSAL_LM", "bert": None}
pytestmark = pytest.mark.filterwarnings("ignore")


def _lora(model: Any, name: str, **options: Any) -> Any:
    """LoRA with a B that is not zero, unlike PEFT's default: with B = 0, A would get no gradient."""
    torch.manual_seed(1)
    defaults = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "task_type": TASKS[name]}
    return get_peft_model(model, LoraConfig(**{**defaults, **options}))


def _both(name: str, order: str = "lora, patch", dropout: float = 0.0, **options: Any) -> tuple[Any, Any]:
    """Ours and stock, with the same weights."""
    family = BY_NAME[name]
    stock = _lora(family.build(BF16, dropout=dropout), name, **options)
    if order == "patch, lora":
        return _lora(patch_model(family.build(BF16, dropout=dropout), BODY), name, **options), stock
    return patch_model(_lora(family.build(BF16, dropout=dropout), name, **options), BODY), stock


def _assert_like_stock(ours: Any, stock: Any, name: str, parameters: int = 1) -> None:
    batch = BY_NAME[name].make_batch("right")
    expected_loss, expected = step(stock, batch)
    loss, grads = step(ours, batch)
    assert torch.equal(loss, expected_loss)
    assert len(expected) >= parameters and not differing(grads, expected)


@named
@orders
@pytest.mark.parametrize("lora_dropout", [0.0, 0.05])
def test_all_linear(name: str, order: str, lora_dropout: float) -> None:
    ours, stock = _both(name, order, dropout=0.1, lora_dropout=lora_dropout)
    assert {p.dtype for p in ours.parameters() if p.requires_grad} == {torch.float32}
    _assert_like_stock(ours, stock, name, 2 * 2 * 4)
    adapters = [m for m in ours.modules() if hasattr(m, "lora_A") and m.lora_A]
    assert adapters and all(
        isinstance(m, AdapterMixin) and isinstance(m.lora_A["default"], PatchedModule) for m in adapters
    )


@pytest.mark.parametrize("lora_dropout", [0.0, 0.05])
def test_adapters_of_the_first_layer(lora_dropout: float) -> None:
    """The first layer's input needs no gradient, because the embedding is frozen. Even so, what q, k and v read is made
    again of it in backward."""
    ours, _ = _both("llama", lora_dropout=lora_dropout)
    report = memory_report(ours, BY_NAME["llama"].make_batch("none"))
    kept = {row.module: row.patched_tensors for row in report.rows}
    # the masks are kept, because they are smaller than the generator's state
    masks = ["bool[3, 13, 32]"] if lora_dropout else []
    projections = [f"base_model.model.model.layers.0.self_attn.{p}_proj" for p in "qkv"]
    assert [kept.get(f"{name}.lora_A.default", ()) for name in projections] == [()] * 3
    assert [list(kept.get(f"{name}.lora_dropout.default", ())) for name in projections] == [masks] * 3


@orders
def test_attention_only(order: str) -> None:
    ours, stock = _both("llama", order, target_modules=["q_proj", "v_proj"])
    _assert_like_stock(ours, stock, "llama", 8)


@orders
def test_modules_to_save(order: str) -> None:
    """The trained copies of norms and head are patched, and not their originals."""
    ours, stock = _both("llama", order, modules_to_save=["lm_head", "norm"])
    _assert_like_stock(ours, stock, "llama", 30)
    trained = [n for n, p in ours.named_parameters() if p.requires_grad and "modules_to_save" in n]
    assert len(trained) == 5 + 1
    copies = [m for n, m in ours.named_modules() if n.endswith("modules_to_save.default")]
    assert len(copies) == 6 and all(isinstance(m, PatchedModule) for m in copies)


@orders
@pytest.mark.parametrize("options", [{"use_rslora": True}, {"use_dora": True}, {"bias": "lora_only"}])
def test_other_options_of_lora(order: str, options: dict[str, Any]) -> None:
    """DoRA reads weights without calling the layers that hold them; the gradients are the same even so."""
    name = "bert" if "bias" in options else "llama"
    ours, stock = _both(name, order, **options)
    _assert_like_stock(ours, stock, name, 28)


@orders
def test_lora_on_the_head_trains(order: str) -> None:
    ours, stock = _both("llama", order, target_modules=["lm_head", "q_proj"])
    _assert_like_stock(ours, stock, "llama", 6)
    assert any("lm_head.lora_B" in n for n in step(ours, BY_NAME["llama"].make_batch())[1])


def test_adapters_added_later_are_patched_on_the_next_forward() -> None:
    ours, stock = _both("llama", "patch, lora")
    for model in (ours, stock):
        torch.manual_seed(2)
        model.add_adapter("second", LoraConfig(r=2, target_modules=["down_proj"], init_lora_weights=False))
        model.set_adapter("second")
    _assert_like_stock(ours, stock, "llama", 4)
    down = ours.base_model.model.model.layers[0].mlp.down_proj
    assert isinstance(down.lora_A["second"], PatchedModule)
    for model in (ours, stock):
        model.set_adapter("default")
    _assert_like_stock(ours, stock, "llama", 28)


@orders
def test_disabled_adapters(order: str) -> None:
    ours, stock = _both("llama", order)
    batch = BY_NAME["llama"].make_batch("right")
    with ours.disable_adapter(), stock.disable_adapter():
        assert torch.equal(ours(**batch).loss, stock(**batch).loss)
    _assert_like_stock(ours, stock, "llama", 28)


@orders
def test_merge_and_unload(order: str) -> None:
    """The base model comes back patched, trains like stock's, and can be unpatched."""
    ours, stock = _both("llama", order)
    merged, expected = ours.merge_and_unload(), stock.merge_and_unload()
    for model in (merged, expected):
        model.requires_grad_(True)
    assert isinstance(merged.model.layers[0].mlp.down_proj, PatchedModule)
    _assert_like_stock(merged, expected, "llama", 21)
    assert [type(m) for m in unpatch_model(merged).modules()] == [type(m) for m in expected.modules()]


@orders
def test_save_and_load_adapters(order: str, tmp_path: Path) -> None:
    ours, stock = _both("llama", order)
    ours.save_pretrained(tmp_path / "ours")
    stock.save_pretrained(tmp_path / "stock")
    files = sorted(p.name for p in (tmp_path / "stock").iterdir())
    assert sorted(p.name for p in (tmp_path / "ours").iterdir()) == files
    assert (tmp_path / "ours/adapter_model.safetensors").read_bytes() == (
        tmp_path / "stock/adapter_model.safetensors"
    ).read_bytes()
    loaded = PeftModel.from_pretrained(BY_NAME["llama"].build(BF16), tmp_path / "ours", is_trainable=True)
    _assert_like_stock(loaded.train(), stock, "llama", 28)


@orders
def test_deepcopy_and_unpatch(order: str) -> None:
    ours, stock = _both("llama", order)
    clone = copy.deepcopy(ours)
    _assert_like_stock(clone, stock, "llama", 28)
    unpatch_model(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in stock.modules()]
    _assert_like_stock(ours, stock, "llama", 28)


@orders
def test_generate_with_adapters(order: str) -> None:
    ours, stock = _both("llama", order)
    ids = BY_NAME["llama"].make_batch()["input_ids"]
    outputs = [
        m.eval().generate(input_ids=ids, max_new_tokens=5, do_sample=False, pad_token_id=0) for m in (ours, stock)
    ]
    assert torch.equal(*outputs)


@orders
def test_prompt_tuning(order: str) -> None:
    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3)

    def tuned(model: nn.Module) -> Any:
        torch.manual_seed(1)
        return get_peft_model(model, config)

    family = BY_NAME["llama"]
    stock = tuned(family.build(BF16))
    if order == "patch, lora":
        ours = tuned(patch_model(family.build(BF16), BODY))
    else:
        ours = patch_model(tuned(family.build(BF16)), BODY)
    _assert_like_stock(ours, stock, "llama", 1)


def test_report_names_adapters() -> None:
    ours, _ = _both("llama")
    report = patch_report(ours)
    assert {"adapter", "gated_mlp", "attention", "linear"} <= {row.role for row in report.patched}
