"""Factors and casts of adapters: stock's bits, without passes over large tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from hf_actcompress import patch_model
from hf_actcompress.graphs.code import forward_code
from hf_actcompress.graphs.inside import narrow_sum
from hf_actcompress.graphs.scales import move_scales
from tests.families import BY_NAME, differing, step
from tests.layers.plans import PLANS, assert_all_ran, plans_of

aten = torch.ops.aten
X, A, B = torch.randn(2, 5, 16), torch.randn(16, 4), torch.randn(4, 16)


def rewritten(call: Callable[..., Any], *args: Tensor) -> GraphModule:
    module = make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
    move_scales(module.graph)
    module.recompile()
    found, expected = module(*args), call(*args)
    for ours, stock in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, expected)), strict=True):
        assert torch.equal(ours, stock) and ours.stride() == stock.stride() and ours.dtype == stock.dtype
    return module


def scaled(module: GraphModule) -> list[int]:
    """The last sizes of the tensors that are multiplied by a factor."""
    muls = (node for node in module.graph.nodes if node.target is aten.mul.Tensor)
    return [node.meta["val"].shape[-1] for node in muls]


@pytest.mark.parametrize("factor", [2.0, 0.25, -4, 1.0, 2.0**-20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_power_of_two_goes_to_the_small_factor(factor: float, dtype: torch.dtype) -> None:
    x, a, b = (t.to(dtype) for t in (X, A, B))
    module = rewritten(lambda x: (x.view(10, 16).mm(a).mm(b).view(2, 5, 16) * factor).sin(), x)
    assert scaled(module) == [4]


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_in_backward_it_goes_behind_the_products(factor: float) -> None:
    def call(dy: Tensor, z: Tensor) -> Any:
        g = (dy * factor).view(10, 16)
        return g.mm(B.t()), g.t().mm(z)

    assert scaled(rewritten(call, X, torch.randn(10, 4))) == [4, 4]


def _read_twice(x: Tensor) -> Any:
    y = x.view(10, 16).mm(A).mm(B)
    return y * 2.0, y


def _read_otherwise(x: Tensor) -> Any:
    g = (x * 2.0).view(10, 16)
    return g.mm(A), g.sum(0)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.view(10, 16).mm(A).mm(B) * 1.5,
        lambda x: x.view(10, 16).mm(A) * 2.0,
        _read_twice,
        _read_otherwise,
        lambda x: (x.view(10, 16) * 2.0).mm(torch.ones(16, 64)),
        lambda x: (x.view(10, 16)[:, :10] * 2.0).mm(x.view(10, 16)[:, :10]),
    ],
)
def test_other_factors_stay(call: Callable[..., Any]) -> None:
    before = make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)(X)
    assert [scaled(m)[0] for m in (rewritten(call, X), before)][0] == scaled(before)[0]


def test_in_fp16_they_stay() -> None:
    x, a, b = (t.half() for t in (X, A, B))
    assert scaled(rewritten(lambda x: x.view(10, 16).mm(a).mm(b) * 2.0, x)) == [16]


def test_a_cast_that_is_undone_is_none() -> None:
    def call(x: Tensor) -> Any:
        wide = x.float()
        return wide.mm(A), wide.bfloat16().mm(A.bfloat16())

    module = rewritten(call, X.view(10, 16).bfloat16())
    casts = [node for node in module.graph.nodes if node.target is aten._to_copy.default]
    # the other one is the constant's
    assert [node.meta["val"].dtype for node in casts if node.meta["val"].shape[0] == 10] == [torch.float32]
    # of a wider tensor, a cast rounds
    narrow = rewritten(lambda x: x.bfloat16().float() + 1, X)
    assert sum(node.target is aten._to_copy.default for node in narrow.graph.nodes) == 2


@pytest.mark.parametrize("turned", [False, True])
def test_a_sum_is_rounded_where_it_is_made(turned: bool) -> None:
    def call(x: Tensor, y: Tensor) -> Any:
        pair = (y.mm(B), x) if turned else (x, y.mm(B))
        return torch.add(*pair).to(torch.bfloat16), y

    args = (X.view(10, 16).bfloat16(), torch.randn(10, 4))
    module = make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
    nodes = list(module.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    run: Any = forward_code(module.graph, inputs, list(nodes[-1].args[0]), [])
    assert torch.equal(run(*args)[0], call(*args)[0])
    assert narrow_sum in run.__globals__.values() and ".add" not in run.source
    free = torch.empty(3, 4, device="meta")
    assert narrow_sum(free.bfloat16(), free, torch.bfloat16, True).dtype == torch.bfloat16


@pytest.mark.parametrize("alpha", [16, 4, 12])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_adapters_have_stocks_bits(alpha: int, checkpointed: bool) -> None:
    """bf16 with adapters in fp32, as PEFT makes them; the factors are 2, 0.5 and 1.5."""
    lora = LoraConfig(r=8, lora_alpha=alpha, target_modules="all-linear", init_lora_weights=False)
    stock = get_peft_model(BY_NAME["llama"].build(torch.bfloat16), lora)
    if checkpointed:
        stock.gradient_checkpointing_enable()
    batch, ours = BY_NAME["llama"].make_batch(), patch_model(copy.deepcopy(stock), PLANS)
    (expected, grads), (loss, found) = step(stock, batch), step(ours, batch)
    assert torch.equal(loss, expected) and not differing(grads, found)
    assert_all_ran(ours)
    known: Any = plans_of(ours)[0].known()[0]
    by_factor = [
        node.meta["val"].shape[-1]
        for node in known.plan.halves.backward.graph.nodes
        if node.target is aten.mul.Tensor and node.args[1] == alpha / 8
    ]
    assert by_factor and (set(by_factor) == {8}) == (alpha != 12)
