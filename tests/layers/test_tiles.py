"""MLPs in tiles as nodes of plans: what backward runs is what the forward ran, whatever happens in between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from hf_actcompress import CompressionConfig, patch_model, unpatch_model
from tests.families import differing, relative_error
from tests.layers.plans import calls, plans_of

TILES = CompressionConfig(tiled_mlp=8)
Between = Callable[[nn.Module], object]


def llama(ffn: int = 64, layers: int = 2) -> Any:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model = hf.LlamaModel(config).train()
    model.norm = nn.Identity()
    return model


def gradients(model: Any, between: Between = lambda model: None) -> dict[str, Tensor]:
    x = torch.randn(1, 24, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    torch.manual_seed(2)
    y = model(inputs_embeds=x)[0]
    between(model)
    y.square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"x": x.grad, **grads}  # type: ignore[dict-item]


def assert_equal_gradients(stock: Any, between: Between = lambda model: None) -> Any:
    ours = patch_model(copy.deepcopy(stock), TILES)
    found, expected = gradients(ours, between), gradients(stock, between)
    assert found.keys() == expected.keys()
    assert relative_error(found, expected) < 1e-6, differing(found, expected)
    assert calls(ours) == [1] * len(plans_of(ours))
    return ours


def test_fewer_rows_than_the_mlp_is_wide() -> None:
    """Its output is small beside the weights, and no statistic that the next layer may compute again."""
    assert_equal_gradients(llama(ffn=2048, layers=3))


def test_a_model_that_is_frozen_before_backward() -> None:
    assert_equal_gradients(llama(), lambda model: model.requires_grad_(False))


def test_weights_that_are_trained_only_after_the_forward() -> None:
    stock = llama()
    for layer in stock.layers:
        layer.mlp.gate_proj.requires_grad_(False)
    assert_equal_gradients(stock, lambda model: model.requires_grad_(True))


def test_a_weight_that_the_mlp_does_not_use_gets_no_gradient() -> None:
    stock = llama()
    for layer in stock.layers:
        layer.mlp.unused = nn.Parameter(torch.zeros(3))
    assert_equal_gradients(stock)


class Block(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)  # type: ignore[no-any-return]


def test_no_rows() -> None:
    mlp = llama().layers[0].mlp
    ours: Any = patch_model(nn.Sequential(Block(mlp), Block(copy.deepcopy(mlp))), TILES)
    for rows in (5, 0):
        x = torch.zeros(rows, 3, 32).requires_grad_()
        y = ours(x)
        y.sum().backward()
        assert y.shape == x.grad.shape == x.shape  # type: ignore[union-attr]
    assert calls(ours) == [2, 2] and all(p.grad is not None for p in ours.parameters())


@pytest.mark.parametrize("attention", ["kept", "recomputed"])
def test_an_mlp_that_draws_runs_no_second_time_in_a_plan(attention: str) -> None:
    """Behind it is a norm, which reads its output in backward, and it would draw other masks there."""
    config = hf.DistilBertConfig(vocab_size=64, dim=32, hidden_dim=64, n_layers=1, n_heads=2, dropout=0.5)
    torch.manual_seed(0)
    model: Any = hf.DistilBertModel(config).train()
    model.gradient_checkpointing_enable()
    patch_model(model, CompressionConfig(tiled_mlp=8, checkpoint_attention=attention))
    gradients(model)
    assert all("draws numbers" in plans.why for plans in plans_of(model))


def test_an_mlp_that_draws_in_a_checkpointed_layer_whose_backward_does_not_read_its_output() -> None:
    """GPT-2's dropout is inside of its MLP, and its output goes into a sum."""
    torch.manual_seed(0)
    kept: Any = hf.GPT2Model(hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.5)).train()
    again = copy.deepcopy(kept)
    again.gradient_checkpointing_enable()
    found, expected = (gradients(patch_model(model, TILES)) for model in (again, kept))
    assert relative_error(found, expected) < 1e-6, differing(found, expected)
    assert calls(again) == [1, 1]


def test_a_norm_behind_an_mlp_that_is_unpatched_before_backward() -> None:
    """OLMo 2 reads the MLP's output in backward, so that a checkpointed layer runs the MLP again, as it was."""
    config = hf.Olmo2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, use_cache=False, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    stock: Any = hf.Olmo2Model(config).train()
    stock.gradient_checkpointing_enable()
    ours = patch_model(copy.deepcopy(stock), TILES)
    found, expected = gradients(ours, unpatch_model), gradients(stock)
    assert relative_error(found, expected) < 1e-6, differing(found, expected)
