"""Layers with a mixture of experts run by plans: stock's bits in fp32, stock's error in 16 bits, and fewer bytes."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_actcompress import patch_model, patch_report
from tests.families import oracle_step, relative_error, step
from tests.layers.plans import (
    PLANS,
    assert_all_ran,
    assert_compiled,
    assert_same,
    assert_stock_bits,
    by_plans,
    kept_bytes,
)
from tests.oracle import EXACT

SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    # of more choices per token torch adds the gradients up in any order
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "use_cache": False,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    **SIZES, "num_key_value_heads": 4, "n_routed_experts": 8, "moe_intermediate_size": 32, "n_group": 2,
    "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "first_k_dense_replace": 0,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "Mixtral": lambda: hf.MixtralConfig(**SIZES, num_local_experts=8),
    "Qwen3-MoE": lambda: hf.Qwen3MoeConfig(**SIZES, num_experts=8, moe_intermediate_size=32, head_dim=16),
    # with biases, weights in the other order, and gates in every second column
    "gpt-oss": lambda: hf.GptOssConfig(**SIZES, num_local_experts=8, head_dim=16),
    "DeepSeek-V3": lambda: hf.DeepseekV3Config(**DEEPSEEK),
}
every_type = pytest.mark.parametrize("name", CONFIGS)


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(CONFIGS[name]()).to(dtype).train()


def batch(length: int = 48, padding: int = 0) -> dict[str, Any]:
    ids = torch.randint(3, 99, (2, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[1, length - padding :] = 0
    masked = {"attention_mask": mask} if padding else {}
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), **masked}


@pytest.mark.daily(2)
@every_type
@pytest.mark.parametrize("checkpointed", [False, True], ids=["whole", "checkpointed"])
def test_stock_bits(name: str, checkpointed: bool) -> None:
    model = build(name)
    if checkpointed:
        model.gradient_checkpointing_enable()
    ours = assert_stock_bits(model, batch())
    # from the second length on by one graph
    for length in (20, 31, 57):
        assert_same(ours, model, batch(length))
    assert_same(ours, model, batch(padding=9))
    assert_all_ran(ours)


@every_type
@pytest.mark.parametrize("mode", ["bf16", "autocast"])
def test_stock_error(name: str, mode: str) -> None:
    """The gradients of routing weights, of inner products, have no larger error than stock's."""
    model = build(name, torch.bfloat16 if mode == "bf16" else torch.float32)
    ours = patch_model(copy.deepcopy(model), PLANS)
    # fp64 has no grouped products
    eager = copy.deepcopy(model)
    eager.set_experts_implementation("eager")
    oracle = oracle_step(eager, batch())
    stock, found = (relative_error(step(one, batch(), mode)[1], oracle) for one in (model, ours))
    assert found <= 1.1 * stock
    assert_all_ran(ours)


class Products(TorchDispatchMode):
    """Counts grouped products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._grouped_mm.default
        return func(*args, **(kwargs or {}))


@every_type
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keeps_no_output_of_an_expert(name: str, dtype: torch.dtype) -> None:
    """In 16 bits without any more products than stock's; in fp32 the output is computed again."""
    model = build(name, dtype)
    exact, int8 = (patch_model(copy.deepcopy(model), by_plans(preset)) for preset in ("exact", "int8"))
    products = []
    for one in (model, exact, int8):
        step(one, batch(), "bf16")
        with Products() as found:
            step(one, batch(), "bf16")
        products.append(found.count)
    layers = model.config.num_hidden_layers
    assert products[1] == products[2] == products[0] + (layers if dtype == torch.float32 else 0)
    stock = kept_bytes(model, batch())
    assert kept_bytes(exact, batch()) <= 0.47 * stock and kept_bytes(int8, batch()) <= 0.29 * stock
    assert_all_ran(exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("trained", ["router", "experts"])
def test_parts_that_are_not_trained(trained: str, dtype: torch.dtype) -> None:
    """Gradients of routing weights without those of experts, and the other way round."""
    model = build("gpt-oss", dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".layers.0." in name and trained in name)
    model.lm_head.weight.requires_grad_()
    ours = patch_model(copy.deepcopy(model), PLANS)
    (loss, found), (expected_loss, expected) = step(ours, batch(), "bf16"), step(model, batch(), "bf16")
    assert torch.equal(loss, expected_loss) and found.keys() == expected.keys()
    eager = copy.deepcopy(model)
    eager.set_experts_implementation("eager")
    oracle = oracle_step(eager, batch())
    assert relative_error(found, oracle) <= EXACT * relative_error(expected, oracle)
    if dtype == torch.float32:
        assert relative_error(found, expected) < 1e-7
    assert_all_ran(ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_are_no_experts(dtype: torch.dtype) -> None:
    """Experts of other devices leave rows of zeros behind."""
    model = build("gpt-oss", dtype)
    for module in model.modules():
        if hasattr(module, "_is_expert_parallel"):
            module._is_expert_parallel, module.num_experts = True, 5
    for layer in model.model.layers:
        for name, weight in list(layer.mlp.experts.named_parameters()):
            setattr(layer.mlp.experts, name, nn.Parameter(weight[:5].detach().clone()))
    ours = patch_model(copy.deepcopy(model), by_plans("exact"))
    (loss, found), (expected_loss, expected) = step(ours, batch(), "fp32"), step(model, batch(), "fp32")
    assert torch.equal(loss, expected_loss)
    if dtype == torch.float32:
        assert relative_error(found, expected) < 1e-7
    # of such experts there is no code in fp64
    wide = step(copy.deepcopy(model).float(), batch(), "fp32")[1]
    assert relative_error(found, wide) <= EXACT * max(relative_error(expected, wide), 1e-7)
    assert kept_bytes(ours, batch()) <= 0.4 * kept_bytes(model, batch())
    assert_all_ran(ours)


def grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """A grouped product of two experts; in fp64, for which torch has none, of the same rows."""
    if rows.dtype != torch.float64:
        return nn.functional.grouped_mm(rows, weight, offs=ends)
    return torch.cat([part @ w for part, w in zip(rows.chunk(2), weight, strict=True)])


def assert_gradients(stock: nn.Module) -> None:
    """Stock's in fp32; in 16 bits with no larger error than stock's, against fp64."""
    dtype = next(stock.parameters()).dtype
    ours, found = patch_model(copy.deepcopy(stock), PLANS), []
    for model in (ours, stock, copy.deepcopy(stock).double()):
        x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
        x = x.to(next(model.parameters()).dtype).requires_grad_()
        # rows that are columns in memory
        model(x).transpose(1, 2).contiguous().square().sum().backward()
        found.append({"x": x.grad, **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}})
    mine, theirs, truth = found
    if dtype == torch.float32:
        assert relative_error(mine, theirs) < 1e-7
    assert relative_error(mine, truth) <= EXACT * relative_error(theirs, truth)
    assert_all_ran(ours)


class Scaled(nn.Module):
    """Two experts, half of the rows for each, whose output has one factor for all rows, or one for each."""

    def __init__(self, each: bool) -> None:
        super().__init__()
        self.weight, self.factor = nn.Parameter(torch.randn(2, 32, 32) / 6), nn.Parameter(torch.ones(1, 1))
        self.norm, self.gate = nn.LayerNorm(32), nn.Linear(32, 1) if each else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        ends = torch.arange(1, 3, dtype=torch.int32, device=x.device) * (rows.size(0) // 2)
        y = grouped(torch.tanh(self.norm(rows)), self.weight, ends) + self.weight[0, 0]
        factor = self.factor if self.gate is None else self.gate(rows).sigmoid()
        return x + (y * factor).view_as(x)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_factors_of_any_shape(each: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert_gradients(nn.Sequential(Scaled(each), Scaled(each)).to(dtype))


class Two(Scaled):
    """Two products with the same factors, each without some rows in its midst."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        ends = torch.arange(1, 3, dtype=torch.int32, device=x.device) * (rows.size(0) // 2)
        factor, h = self.gate(rows).sigmoid(), torch.tanh(self.norm(rows))  # type: ignore[misc]
        without = (torch.arange(rows.size(0), device=x.device) % 3 == 0)[:, None]
        y = grouped(h, self.weight, ends).masked_fill(without, 0.0)
        z = grouped(h * h, 2 * self.weight.flip(0), ends)
        return x + (y * factor + z * factor).view_as(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_with_the_same_factors_and_rows_that_are_masked(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert_gradients(nn.Sequential(Two(True), Two(True)).to(dtype))


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_other_implementations(implementation: str) -> None:
    """Stock keeps the weights of batched experts once for each pair of token and expert."""
    model = build("Mixtral")
    model.set_experts_implementation(implementation)
    ours = patch_model(copy.deepcopy(model), PLANS)
    assert ("set_experts_implementation" in str(patch_report(ours))) == (implementation == "eager")
    (_, found), (_, expected) = step(ours, batch(), "fp32"), step(model, batch(), "fp32")
    assert relative_error(found, expected) < 1e-6
    limit = 0.12 if implementation == "batched_mm" else 0.75
    assert kept_bytes(ours, batch()) <= limit * kept_bytes(model, batch())


@pytest.mark.daily(4)
@every_type
def test_compiled(name: str) -> None:
    """A segment of a compiler's code makes views of another segment's results itself."""
    model = build(name)
    ours = patch_model(copy.deepcopy(model), replace(PLANS, compile=True))
    (_, found), (_, stock) = step(ours, batch()), step(model, batch())
    assert relative_error(found, stock) < 1e-5
    assert_compiled(ours)
