"""A probe must detect what differs only for mixed dtypes, large values or further arguments, and leave no trace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from hf_actcompress import CompressionConfig, patch_model, patch_report, unpatch_model
from hf_actcompress.config import PRESETS
from hf_actcompress.models.gated_mlps import find_gated_mlp
from hf_actcompress.models.probe import DTYPES, Answers, answers_kept
from hf_actcompress.models.rms_norms import find_rms_norm
from hf_actcompress.models.sites import Declined, Site
from hf_actcompress.modules.base import PatchedModule
from tests.families import BY_NAME

WIDTH = 24


class ClampedRMSNorm(LlamaRMSNorm):
    """It equals Llama's norm for values near zero."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states.clamp(-50.0, 50.0))


class ClampedMLP(LlamaMLP):
    """Equal to Llama's for small gates: the clamp of DeepSeek-V4 and Step-3."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x).clamp(max=7.0)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x).clamp(-7.0, 7.0))


class WideMLP(LlamaMLP):
    """It computes in fp32 inside, which changes the result only for inputs of a narrower dtype."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj((self.act_fn(gate.float()) * up.float()).to(x.dtype))


class GatedRMSNorm(LlamaRMSNorm):
    """Like Mamba's norm, it computes something else if it gets a gate."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(hidden_states if gate is None else hidden_states * nn.functional.silu(gate))


class MLPWithScale(LlamaMLP):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale


def gradients(module: nn.Module, x: Tensor, autocast: bool, *args: Any) -> tuple[Tensor, ...]:
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y = module(x, *args)
    wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
    return (y.detach(), *torch.autograd.grad(y.float().sin().sum(), wanted))


def same_as_stock(stock: nn.Module, x: Tensor, autocast: bool = False, *args: Any) -> None:
    ours = patch_model(copy.deepcopy(stock), strict=False)
    for a, b in zip(gradients(ours, x, autocast, *args), gradients(stock, x, autocast, *args), strict=True):
        assert a.dtype == b.dtype
        exact = a.dtype == torch.float32 and not autocast
        torch.testing.assert_close(a, b, rtol=1e-5 if exact else 2e-2, atol=1e-6 if exact else 2e-3)


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("input_dtype", DTYPES)
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Olmo2RMSNorm])
def test_rms_norms_of_mixed_dtypes(kind: Any, input_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """Llama's gain is applied after the cast and OLMo's before: in equal dtypes both give the same values."""
    norm = kind(WIDTH).to(weight_dtype)
    nn.init.normal_(norm.weight, 1.0, 0.3)
    x = 3 * torch.randn(2, 5, WIDTH).to(input_dtype)
    ours = patch_model(copy.deepcopy(norm))
    assert isinstance(ours, PatchedModule)
    y, expected = ours(x.requires_grad_()), norm(x)
    assert y.dtype == expected.dtype and torch.equal(y, expected)
    same_as_stock(norm, x.detach())


@pytest.mark.parametrize("kind", [ClampedMLP, WideMLP, MLPWithScale])
def test_other_gated_mlps_are_left_alone(kind: Any) -> None:
    mlp = kind(LlamaConfig(hidden_size=8, intermediate_size=12, num_attention_heads=1))
    # with tiles for checkpointed layers, which run its own code
    whole = patch_model(copy.deepcopy(mlp), CompressionConfig(tiled_mlp=0))
    (row,) = (row for row in patch_report(whole).rows if row.role == "gated_mlp")
    assert row.reason
    same_as_stock(mlp, 100 * torch.randn(2, 3, 8))
    same_as_stock(mlp, torch.randn(2, 3, 8), autocast=True)


def test_a_norm_that_clamps_is_left_alone() -> None:
    same_as_stock(ClampedRMSNorm(WIDTH), 200 * torch.randn(2, 5, WIDTH))
    assert patch_report(patch_model(ClampedRMSNorm(WIDTH), strict=False)).left_alone


def test_a_gated_norm_is_left_alone_and_runs() -> None:
    norm = GatedRMSNorm(WIDTH)
    (row,) = patch_report(patch_model(copy.deepcopy(norm), strict=False)).rows
    assert "gate" in row.reason
    same_as_stock(norm, torch.randn(2, 5, WIDTH), False, torch.randn(2, 5, WIDTH))


def test_spectral_norm_is_not_run_by_patching() -> None:
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5))
    model = nn.Sequential(layer, nn.GELU(), nn.Linear(5, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert patch_report(patch_model(model)).patched
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    unpatch_model(model)
    same_as_stock(model, torch.randn(4, 6))


def test_a_weight_is_read_once_per_call() -> None:
    """A parametrisation runs each time that the weight is read: its power iteration must not run twice."""

    class Counting(nn.Module):
        calls = 0

        def forward(self, weight: Tensor) -> Tensor:
            Counting.calls += 1
            return weight * 2.0

    model = patch_model(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    for layer in model:
        nn.utils.parametrize.register_parametrization(layer, "weight", Counting())
    for context in (torch.enable_grad(), torch.no_grad()):
        Counting.calls = 0
        with context:
            model(torch.randn(3, 4))
        assert Counting.calls == 2


def test_generators_and_buffers_are_as_before() -> None:
    class Noisy(LlamaRMSNorm):
        def __init__(self) -> None:
            super().__init__(WIDTH)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, hidden_states: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(hidden_states + 1e-3 * torch.rand(()))

    norm = Noisy()
    state = torch.get_rng_state()
    patch_model(norm, strict=False)
    assert torch.equal(torch.get_rng_state(), state) and norm.calls == 0


@pytest.mark.parametrize("dropout", (0.0, 0.1))
@pytest.mark.parametrize("name", ("llama", "qwen2", "bert", "gpt2-gelu-tanh", "vit"))
def test_eager_attention_under_autocast(name: str, dropout: float) -> None:
    """Rotary angles make the query's dtype wider than the value's. Probabilities must be dropped in stock's dtype."""
    stock = BY_NAME[name].build(dropout=dropout, attn_implementation="eager")
    ours = patch_model(copy.deepcopy(stock), "tempo")
    batch = BY_NAME[name].make_batch("none")
    losses = []
    for model in (stock, ours):
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(model(**batch).loss)
    assert any(row.role == "attention" and row.kind == "eager" for row in patch_report(ours).patched)
    assert torch.equal(*losses)


class SwitchedRMSNorm(LlamaRMSNorm):
    """Llama's norm or the clamped one, depending on an attribute."""

    def __init__(self, clamp: float | None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(WIDTH)
        self.clamp = clamp
        self.to(dtype)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states if self.clamp is None else hidden_states.clamp(-self.clamp, self.clamp)
        return super().forward(x)


def test_modules_that_are_alike_are_asked_once_and_others_each() -> None:
    answers: Answers = {}
    norms = [SwitchedRMSNorm(None), SwitchedRMSNorm(None), SwitchedRMSNorm(50.0), SwitchedRMSNorm(None, torch.bfloat16)]
    with answers_kept(answers):
        found = [find_rms_norm(norm, PRESETS["exact"]) for norm in norms]
    assert len(answers) == 3
    assert found == [find_rms_norm(norm, PRESETS["exact"]) for norm in norms]
    assert isinstance(found[0], Site) and isinstance(found[2], Declined)


def test_gated_mlps_are_asked_once_for_each_config_kind_of_child_and_size() -> None:
    config, wider = (LlamaConfig(hidden_size=WIDTH, intermediate_size=size, num_attention_heads=2) for size in (48, 64))
    mlps = [LlamaMLP(config), LlamaMLP(config), LlamaMLP(wider), LlamaMLP(config), ClampedMLP(config)]
    mlps[3].act_fn = nn.GELU()
    answers: Answers = {}
    with answers_kept(answers):
        found = [find_gated_mlp(mlp, PRESETS["exact"]) for mlp in mlps]
    assert len(answers) == 4
    assert found == [find_gated_mlp(mlp, PRESETS["exact"]) for mlp in mlps]
    assert isinstance(found[0], Site) and isinstance(found[4], Declined)


class OwnError(Exception):
    """An error of a model's own."""


ERRORS = [AssertionError, ImportError, ZeroDivisionError, OSError, OwnError, RuntimeError, StopIteration]


def refusing(stock: type[nn.Module], error: type[Exception]) -> type[nn.Module]:
    """A subclass whose forward raises that error for every shape but the one of this test's batch."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if hidden_states.shape[:2] != (3, 7):
            raise error("this shape is none of mine")
        return stock.forward(self, hidden_states)

    return type(f"Refusing{stock.__name__}", (stock,), {"forward": forward})


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("kind", [LlamaRMSNorm, LlamaMLP, nn.SiLU, nn.Linear, nn.LayerNorm, nn.Module])
def test_a_module_that_raises_on_a_probe_is_left_alone(kind: type[nn.Module], error: type[Exception]) -> None:
    made = {
        LlamaMLP: (LlamaConfig(hidden_size=WIDTH, intermediate_size=WIDTH, num_attention_heads=4),),
        nn.Linear: (WIDTH, WIDTH),
        nn.SiLU: (),
        nn.Module: (),
    }.get(kind, (WIDTH,))
    part = refusing(kind, error)(*made) if kind is not nn.Module else _Doubles(error)
    stock = nn.Sequential(nn.Linear(WIDTH, WIDTH), part, nn.Linear(WIDTH, WIDTH))
    same_as_stock(stock, torch.randn(3, 7, WIDTH))


class _Doubles(nn.Module):
    """A cheap function of its input that takes one shape alone."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[:2] != (3, 7):
            raise self.error("this shape is none of mine")
        return (2 * x).tanh() * x


@pytest.mark.parametrize("error", ERRORS)
def test_a_module_that_raises_where_gradients_are_recorded_is_left_alone(error: type[Exception]) -> None:
    class Refusing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled() and x.shape[:2] != (3, 7):
                raise error("this shape is none of mine")
            return (2 * x).tanh() * x

    same_as_stock(nn.Sequential(nn.Linear(WIDTH, WIDTH), Refusing()), torch.randn(3, 7, WIDTH))
