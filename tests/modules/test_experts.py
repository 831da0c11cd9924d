"""Mixtures of experts through transformers' interface: bytes, values, gradients, and when stock's code runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from hf_actcompress import CompressionConfig, patch_model, patch_report, unpatch_model
from hf_actcompress.modules.base import settings_of
from hf_actcompress.modules.experts import ExpertsMixin
from tests.oracle import EXACT, assert_equal_bits, kept_bytes

H, FFN, EXPERTS, CHOICES, TOKENS = 64, 32, 8, 2, 480
_SIZES = {
    "hidden_size": H, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99,
    "use_cache": False,
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**_SIZES, intermediate_size=FFN, num_local_experts=EXPERTS, num_experts_per_tok=CHOICES)
    ),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(
            **_SIZES, intermediate_size=FFN, moe_intermediate_size=FFN, num_experts=EXPERTS,
            num_experts_per_tok=CHOICES, head_dim=16,
        )
    ),
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **_SIZES, intermediate_size=FFN, num_local_experts=EXPERTS, num_experts_per_tok=CHOICES, head_dim=16
        )
    ),
}  # fmt: skip


def experts_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype).train()
    return next(m for n, m in model.named_modules() if n.endswith("experts"))


pytestmark = [
    pytest.mark.daily(2),
    pytest.mark.skipif(
        not hasattr(experts_of("mixtral"), "_is_expert_parallel"),
        reason="this transformers does not say how its experts are laid out: stock's code runs under the net",
    ),
]


def inputs(dtype: torch.dtype, routing: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, H, generator=generator).to(dtype)
    weights, index = torch.randn(TOKENS, EXPERTS - 1, generator=generator).softmax(-1).topk(CHOICES)
    return hidden, index, weights.to(routing)


def results(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> list[Tensor]:
    hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    y = experts(hidden, index, weights)
    wanted = (hidden, weights, *experts.parameters())
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    return [y.detach(), *torch.autograd.grad(y, wanted, dy.to(y.dtype))]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_values_are_stocks_bits_and_gradients_no_worse(name: str, dtype: torch.dtype, wide: bool) -> None:
    """The last expert gets no row."""
    stock = experts_of(name, dtype)
    ours = patch_model(copy.deepcopy(stock))
    assert settings_of(ours).role == "experts"
    given = inputs(dtype, torch.float32 if wide else dtype)
    mine, theirs = results(ours, *given), results(stock, *given)
    assert torch.equal(mine[0], theirs[0])
    if dtype == torch.float32:
        assert_equal_bits(mine, theirs)
    wider = copy.deepcopy(stock).double()
    wider.config = copy.copy(stock.config)
    # stock's grouped products have no kernel for fp64
    wider.config._experts_implementation = "eager"
    truth = results(wider, given[0].double(), given[1], given[2].double())
    for x, y, z in zip(mine[1:], theirs[1:], truth[1:], strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert (x - z).norm() <= EXACT * (y - z).norm()


@pytest.mark.parametrize("name", MODELS)
def test_kept_is_the_first_projections_output(name: str) -> None:
    """Stock keeps the gathered rows, the activation, the gated product and the output of the last projection, too."""
    hidden, index, weights = inputs(torch.bfloat16, torch.bfloat16)
    stock = experts_of(name, torch.bfloat16)
    ours = patch_model(copy.deepcopy(stock))

    leaves = hidden.clone().requires_grad_(), weights.clone().requires_grad_()

    def forward(experts: Any) -> int:
        return kept_bytes(lambda: experts(-leaves[0], index, leaves[1]))

    pairs = TOKENS * CHOICES
    # indices and routing weights are the rest
    floor = TOKENS * H * 2 + pairs * 2 * FFN * 2
    assert floor <= forward(ours) <= floor + 8 * 6 * pairs
    assert forward(stock) - forward(ours) >= pairs * (2 * H + FFN) * 2 - TOKENS * H * 2
    int8 = patch_model(copy.deepcopy(stock), "int8")
    assert forward(int8) <= forward(ours) - 0.8 * pairs * 2 * FFN


def test_stocks_code_runs_where_ours_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = patch_model(experts_of("mixtral"))
    calls: list[int] = []
    monkeypatch.setattr(ExpertsMixin, "_grouped", lambda self, *given: calls.append(1) or torch.zeros(()))
    given = inputs(torch.float32, torch.float32)
    hidden = given[0].clone().requires_grad_()
    ours(hidden, given[1], top_k_weights=given[2])
    assert len(calls) == 1
    with torch.no_grad():
        ours(*given)
    ours.config._experts_implementation = "eager"
    ours(hidden, *given[1:])
    ours.config._experts_implementation = "grouped_mm"
    ours._is_expert_parallel = True
    ours(hidden, *given[1:])
    ours._is_expert_parallel = False
    ours.act_fn.register_forward_hook(lambda module, args, y: None)
    ours(hidden, *given[1:])
    assert len(calls) == 1


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_other_implementations_are_left_alone_with_a_reason(implementation: str) -> None:
    model = MODELS["mixtral"]()
    model.set_experts_implementation(implementation)
    patch_model(model)
    experts = next(m for n, m in model.named_modules() if n.endswith("experts"))
    assert settings_of(experts) is None
    assert implementation in str(patch_report(model))


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_the_net_knows_what_other_implementations_keep(implementation: str) -> None:
    """Stock keeps the weights of batched experts once for each pair of token and expert."""
    torch.manual_seed(0)
    stock = MODELS["mixtral"]().train()
    stock.set_experts_implementation(implementation)
    ours = patch_model(copy.deepcopy(stock), CompressionConfig(loss_head=False))
    batch = {"input_ids": torch.arange(2 * 24).view(2, 24), "labels": torch.arange(2 * 24).view(2, 24)}
    for model in (stock, ours):
        model(**batch).loss.backward()
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-7)
    bytes_kept = [kept_bytes(lambda model=model: model(**batch).loss) for model in (stock, ours)]
    weights = 2 * 24 * CHOICES * 3 * H * FFN * 4 if implementation == "batched_mm" else 0
    assert bytes_kept[0] - bytes_kept[1] >= max(weights, 0.25 * bytes_kept[0])


def test_frozen_experts_and_unpatching() -> None:
    model = MODELS["mixtral"]().train()
    stock_class = type(model.model.layers[0].mlp.experts)
    for p in model.model.layers[0].mlp.experts.parameters():
        p.requires_grad_(False)
    batch = {"input_ids": torch.arange(2 * 24).view(2, 24), "labels": torch.arange(2 * 24).view(2, 24)}
    stock = copy.deepcopy(model)
    patch_model(model, CompressionConfig(loss_head=False))
    for m in (stock, model):
        m(**batch).loss.backward()
    for a, b in zip(model.parameters(), stock.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-7)
    unpatch_model(model)
    assert type(model.model.layers[0].mlp.experts) is stock_class
