"""Copies of modules that run again in backward: their gradients are those of the modules' weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.ops.snapshot import Snapshot

_LLAMA = hf.LlamaConfig(
    vocab_size=67, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_hidden_layers=2, use_cache=False
)


def _compile(module: nn.Module) -> None:
    module.compile(backend="eager")


def _replace_forward(module: Any) -> None:
    # as accelerate's hooks do
    stock = module.forward
    module.forward = lambda *args, **kwargs: stock(*args, **kwargs)


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    ids = torch.arange(40).view(2, 20)
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["gate_proj", "down_proj"])
@pytest.mark.parametrize("changed", [_compile, _replace_forward])
def test_a_child_that_is_called_otherwise_gets_its_gradient(changed: Callable[[Any], None], name: str) -> None:
    stock = hf.LlamaForCausalLM(_LLAMA).train()
    model = patch_model(copy.deepcopy(stock), CompressionConfig(tiled_mlp=8))
    changed(model.get_submodule(f"model.layers.0.mlp.{name}"))
    expected, found = _gradients(stock), _gradients(model)
    assert None not in expected.values()
    torch.testing.assert_close(found, expected)


def test_which_copies_call_each_other_only() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.GELU())
    for part, is_closed in ((module, True), (module[0], False)):
        _replace_forward(part)
        assert Snapshot(module, lambda twin: twin).is_closed == is_closed


def test_an_adapter_that_is_merged_before_the_backward_raises() -> None:
    """Its weights are written through `.data`, so no version shows it, and the MLP is recomputed."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["gate_proj", "up_proj"], r=4)
    model: Any = patch_model(peft.get_peft_model(hf.LlamaForCausalLM(_LLAMA), lora), CompressionConfig(tiled_mlp=8))
    ids = torch.arange(40).view(2, 20)
    loss = model.train()(input_ids=ids, labels=ids).loss
    model.merge_adapter()
    with pytest.raises(RuntimeError, match="an adapter was merged"):
        loss.backward()
