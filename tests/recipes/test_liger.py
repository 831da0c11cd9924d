"""The benchmark's peer: Liger's patch of one model leaves every other model of the process as it was."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Installs a package that patches a global name, as Liger does. It needs no GPU. Returns what was called."""
    called: list[str] = []
    stock = modeling_llama.apply_rotary_pos_emb

    def rope(*args: Any) -> Any:
        called.append("rope")
        return stock(*args)

    def apply(model: Any) -> None:
        assert type(model) is LlamaForCausalLM
        modeling_llama.apply_rotary_pos_emb = rope

    package, transformers, patch = (ModuleType(name) for name in ("liger_kernel", "transformers", "monkey_patch"))
    transformers._apply_liger_kernel_to_instance = apply
    patch.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": apply}
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", transformers)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", patch)
    monkeypatch.syspath_prepend(str(RECIPES))
    return called


@pytest.mark.parametrize("adapters", [False, True])
def test_one_model_alone_is_patched(calls: list[str], adapters: bool) -> None:
    liger: Any = importlib.import_module("common.liger")
    options = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    config = LlamaConfig(num_hidden_layers=2, num_key_value_heads=1, use_cache=False, **options)
    stock, model = LlamaForCausalLM(config), LlamaForCausalLM(config)
    if adapters:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    before = dict(vars(modeling_llama))
    assert liger.apply_liger(model) is model
    assert dict(vars(modeling_llama)) == before
    ids = torch.randint(3, 64, (1, 5))
    stock(input_ids=ids)
    assert not calls
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    loss = model.train()(input_ids=ids, labels=ids).loss
    assert len(calls) == 2
    loss.backward()
    # the recomputation calls it, too
    assert len(calls) == 4


def test_models_without_kernels_are_known(calls: list[str]) -> None:
    liger: Any = importlib.import_module("common.liger")
    assert liger.has_kernels("llama") and not liger.has_kernels("bert")
