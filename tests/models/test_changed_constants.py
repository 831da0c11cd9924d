"""Constants that change after `patch_model`: the forward reads them as they are, and backward reads no module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.config_checks import VARIANTS
from hf_actcompress.models.leaves import ACTIVATION_TYPES
from hf_actcompress.models.rms_norms import EPS_NAMES
from hf_actcompress.modules.base import own_attributes
from tests.oracle import assert_equal_bits, assert_within_law, pattern, widened

WIDTH = 24


@dataclass(frozen=True)
class Change:
    """A module, and another value for a constant of it, or of the child that `of` names."""

    name: str
    make: Callable[[], nn.Module]
    attribute: str
    value: Any
    of: str = ""
    shape: tuple[int, ...] = (5, 7, WIDTH)

    def __str__(self) -> str:
        return f"{self.name}.{self.attribute}"

    def apply(self, module: nn.Module) -> None:
        setattr(module[0].get_submodule(self.of), self.attribute, self.value)  # type: ignore[index]

    def model(self) -> nn.Module:
        """The module and a layer behind it, which needs the module's output again in backward."""
        torch.manual_seed(0)
        module = self.make()
        return nn.Sequential(module, nn.Linear(WIDTH, 4) if len(self.shape) == 3 else nn.Conv2d(4, 2, 1))


def other(value: Any) -> Any:
    if isinstance(value, str):
        return {"none": "tanh", "tanh": "none"}[value]
    return not value if isinstance(value, bool) else 0.6 * value + 0.2


def of_activations() -> Iterator[Change]:
    kinds: dict[str, Callable[[], nn.Module]] = {
        f"nn.{kind.__name__}": kind for kind in (nn.GELU, *ACTIVATION_TYPES) if kind.__module__.startswith("torch.")
    }
    kinds |= {name: lambda name=name: copy.deepcopy(ACT2FN[name]) for name in sorted(ACT2FN)}  # type: ignore[misc]
    for name, make in kinds.items():
        for attribute, value in own_attributes(make()).items():
            if isinstance(value, (bool, int, float, str)) and attribute != "num_parameters":
                yield Change(name, make, attribute, other(value))
    gated = LlamaConfig(hidden_size=WIDTH, intermediate_size=40, num_attention_heads=4, hidden_act="leaky_relu")
    yield Change("LlamaMLP.act_fn", lambda: LlamaMLP(gated), "negative_slope", 0.4, "act_fn")


def of_norms() -> Iterator[Change]:
    rows: tuple[tuple[Callable[..., nn.Module], tuple[int, ...]], ...] = (
        (nn.LayerNorm, (WIDTH,)), (nn.RMSNorm, (WIDTH,)), (LlamaRMSNorm, (WIDTH,)), (T5LayerNorm, (WIDTH,)),
        (GemmaRMSNorm, (WIDTH,)), (nn.GroupNorm, (1, 5)), (nn.BatchNorm1d, (5,)),
    )  # fmt: skip
    for kind, args in rows:
        shape = (7, 5, WIDTH)
        name = next(name for name in EPS_NAMES if hasattr(kind(*args), name))
        yield Change(kind.__name__, lambda kind=kind, args=args: kind(*args), name, 0.3, shape=shape)  # type: ignore[misc]


def of_convolutions() -> Iterator[Change]:
    for attribute, value in (("stride", (1, 1)), ("padding", (2, 2)), ("dilation", (2, 1))):
        yield Change("nn.Conv2d", lambda: nn.Conv2d(6, 4, 3, stride=2), attribute, value, shape=(2, 6, 9, 9))


CHANGES = [*of_activations(), *of_norms(), *of_convolutions()]
every_change = pytest.mark.parametrize("change", CHANGES, ids=str)


def gradients_of(model: nn.Module, x: Tensor, between: Callable[[], object] = lambda: None) -> list[Tensor]:
    """The output and the gradients of input and weights; `between` runs between forward and backward."""
    x = x.clone().requires_grad_()
    y = model(x * 1)  # an activation may work in place
    between()
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], pattern(y))]


def same(ours: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, ours, expected))


@pytest.mark.parametrize("norm_variant", VARIANTS["norm_variant"])
@every_change
def test_before_a_forward(change, norm_variant):
    stock, x = change.model(), torch.randn(change.shape)
    ours = copy.deepcopy(stock)
    patch_model(ours, CompressionConfig(norm_variant=norm_variant))
    change.apply(ours)
    change.apply(stock)
    expected, found = gradients_of(stock, x), gradients_of(ours, x)
    assert_equal_bits(found[:1], expected[:1])
    if norm_variant == "input":
        assert_within_law(found, expected, gradients_of(widened(stock), x.double()))
    else:
        assert all(map(torch.allclose, found, expected, [1e-4] * len(found), [1e-4] * len(found)))


@every_change
def test_between_forward_and_backward(change):
    ours, x = change.model(), torch.randn(change.shape)
    patch_model(ours)
    again = copy.deepcopy(ours)
    assert_equal_bits(gradients_of(ours, x, lambda: change.apply(ours)), gradients_of(again, x))


@pytest.mark.parametrize("variant", VARIANTS["activation_variant"])
@pytest.mark.parametrize("change", [*of_activations()], ids=str)
def test_variants_of_activations(change, variant):
    """Ours is what it would be if the constant had been changed before `patch_model`, or stock's code runs."""
    stock, x = change.model(), torch.randn(change.shape)
    ours, after = copy.deepcopy(stock), copy.deepcopy(stock)
    config = CompressionConfig(activation_variant=variant)
    patch_model(ours, config)
    for model in (ours, after, stock):
        change.apply(model)
    patch_model(after, config)
    found, expected = gradients_of(ours, x), gradients_of(stock, x)
    assert_equal_bits(found[:1], expected[:1])
    assert same(found, gradients_of(after, x)) or same(found, expected)


@pytest.mark.parametrize(
    ("of", "attribute"),
    [("input_layernorm", "variance_epsilon"), ("mlp.act_fn", "negative_slope"), ("self_attn", "scaling")],
)
def test_in_a_layer_that_runs_by_plans(of, attribute):
    options = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "vocab_size": 19}
    torch.manual_seed(0)
    stock = LlamaForCausalLM(LlamaConfig(**options, num_hidden_layers=1, hidden_act="leaky_relu"))
    ours, ids = copy.deepcopy(stock), torch.arange(14).view(2, 7)
    patch_model(ours)

    def run(model: nn.Module) -> list[Tensor]:
        loss = model(input_ids=ids, labels=ids).loss
        return [loss.detach(), *torch.autograd.grad(loss, [*model.parameters()])]

    run(ours)
    plans: Any = ours.model.layers[0].actcompress.plans
    assert plans.calls == 1
    for model in (stock, ours):
        setattr(model.model.layers[0].get_submodule(of), attribute, 0.4)
    after = copy.deepcopy(stock)
    patch_model(after)
    found = run(ours)
    assert_equal_bits(found[:1], run(stock)[:1])
    assert_equal_bits(found, run(after))
    assert (plans.calls, plans.leaf_calls) == (2, 0)


@pytest.mark.parametrize("variant", ["input", "derivative", "steps3"])
def test_compiled(variant):
    stock, x = nn.Sequential(nn.ELU(), nn.Linear(WIDTH, 4)), torch.randn(7, WIDTH)
    ours = copy.deepcopy(stock)
    patch_model(ours, CompressionConfig(activation_variant=variant))
    torch.compiler.reset()
    compiled: Any = torch.compile(ours, backend="aot_eager")
    gradients_of(compiled, x)
    for alpha in (0.5, 0.4):
        stock[0].alpha = ours[0].alpha = alpha
        for found, expected in zip(gradients_of(compiled, x), gradients_of(stock, x), strict=True):
            torch.testing.assert_close(found, expected)
