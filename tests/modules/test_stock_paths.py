"""Calls that a patched module leaves to its stock forward, and modules that others make out of patched classes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

from hf_actcompress import patch_model, patch_report, unpatch_model
from hf_actcompress.modules.base import settings_of

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...], str]] = {
    "linear": (nn.Linear(6, 4), (2, 3, 6), "input"),
    "conv1d": (Conv1D(4, 6), (2, 3, 6), "x"),
    "conv2d": (nn.Conv2d(3, 4, 2), (2, 3, 5, 5), "input"),
    "layer_norm": (nn.LayerNorm(6), (2, 3, 6), "input"),
    "rms_norm": (LlamaRMSNorm(6), (2, 3, 6), "hidden_states"),
    "gelu": (nn.GELU(), (2, 3, 6), "input"),
    "dropout": (nn.Dropout(0.5), (2, 3, 6), "input"),
    "gated_mlp": (LlamaMLP(LlamaConfig(hidden_size=6, intermediate_size=8, num_attention_heads=1)), (2, 3, 6), "x"),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def both(name: str) -> tuple[Any, Any, Tensor, str]:
    layer, shape, keyword = LAYERS[name]
    torch.manual_seed(0)
    return patch_model(copy.deepcopy(layer)), copy.deepcopy(layer), torch.randn(shape, requires_grad=True), keyword


def same(ours: Any, stock: Any, x: Tensor, call: Any) -> None:
    found = []
    for module in (ours, stock):
        torch.manual_seed(1)
        y = call(module, x)
        found.append((y, *torch.autograd.grad(y.sin().sum(), [x, *module.parameters()])))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@every_layer
def test_called_by_keyword(name: str) -> None:
    ours, stock, x, keyword = both(name)
    same(ours, stock, x, lambda module, x: module(**{keyword: x}))


@every_layer
def test_a_patched_class_without_settings_is_stock(name: str) -> None:
    """PEFT makes such modules: it creates the adapters of a convolution from the class of the adapted layer."""
    ours, stock, x, _ = both(name)
    for module in ours.modules():
        module.__dict__.pop("actcompress", None)
    assert all(settings_of(module) is None for module in ours.modules())
    same(ours, stock, x, lambda module, x: module(x))
    types = [type(module) for module in unpatch_model(ours).modules()]
    assert types == [type(module) for module in stock.modules()]


def test_a_layer_made_by_a_patched_class_is_patched_with_the_model() -> None:
    model = patch_model(nn.Sequential(nn.Linear(4, 4)))
    model.append(type(model[0])(4, 2))
    assert settings_of(model[1]) is None
    model(torch.randn(3, 4))
    assert settings_of(model[1]) is not None and not patch_report(model).left_alone
    assert [type(module) for module in unpatch_model(model)] == [nn.Linear, nn.Linear]


@every_layer
def test_forward_mode_differentiation_runs_stock(name: str) -> None:
    ours, stock, x, _ = both(name)
    tangents = []
    for module in (ours, stock):
        torch.manual_seed(1)
        with forward_ad.dual_level():
            y = module(forward_ad.make_dual(x.detach(), torch.ones_like(x)))
            tangents.append(forward_ad.unpack_dual(y).tangent)
    assert torch.equal(*tangents)


class Scaled(Tensor):
    """A weight that stands for twice its data, as quantised weights stand for what they decode to."""

    @staticmethod
    def __new__(cls, data: Tensor) -> Scaled:
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, data: Tensor) -> None:
        self.data_inside = data

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} reads the memory of a tensor that has none")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, bias = args
            return nn.functional.linear(x, 2.0 * weight.data_inside, bias)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_weight_that_is_no_plain_tensor_is_used_by_stock_alone() -> None:
    ours, _, x, _ = both("linear")
    weight = ours.weight.detach().clone()
    del ours._parameters["weight"]
    ours.__dict__["weight"] = Scaled(weight)
    (dx,) = torch.autograd.grad(ours(x).sum(), x)
    torch.testing.assert_close(dx, 2.0 * weight.sum(0).expand_as(dx))


def test_writing_in_place_on_the_output_of_a_linear_layer() -> None:
    stock = nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    ours, x = patch_model(copy.deepcopy(stock)), torch.randn(2, 3, 6, requires_grad=True)
    same(ours, stock, x, lambda module, x: module(x))


@pytest.mark.parametrize("name", ["linear", "conv1d", "conv2d", "layer_norm", "rms_norm"])
def test_data_exchanged_between_forward_and_backward(name: str) -> None:
    """Gradients are those of the data that the forward saw. Stock linear layers keep views of these data."""
    ours, stock, x, _ = both(name)
    expected = torch.autograd.grad(stock(x).sin().sum(), [x, *stock.parameters()])
    y = ours(x).sin().sum()
    for p in ours.parameters():
        p.data = 3.0 * p.data + 1.0
    for a, b in zip(torch.autograd.grad(y, [x, *ours.parameters()]), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_writing_in_place_on_a_weight_raises() -> None:
    ours, _, x, _ = both("linear")
    y = ours(x)
    with torch.no_grad():
        ours.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
