"""Experts with LoRA of PEFT's `target_parameters`: the weights that it makes for each call are not kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.private_apis import parametrizations
from tests.families import oracle_step, relative_error, step
from tests.layers.plans import assert_all_ran
from tests.oracle import EXACT, assert_equal_bits, kept_bytes

pytestmark = pytest.mark.daily(2)

H, FFN, EXPERTS, CHOICES = 64, 32, 8, 2
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
BATCH = {"input_ids": torch.arange(2 * 24).view(2, 24), "labels": torch.arange(2 * 24).view(2, 24)}
IMPLEMENTATIONS = ["grouped_mm", "batched_mm", "eager"]
# of the weights of all experts, in fp32
WEIGHTS = EXPERTS * 3 * H * FFN * 4


def with_lora(name: str = "mixtral", implementation: str = "grouped_mm") -> Any:
    """Experts with LoRA's `target_parameters`."""
    peft = pytest.importorskip("peft")
    if not hasattr(peft.tuners.lora.layer, "_LoraFactorsProxy"):
        pytest.skip("this PEFT makes the whole difference of the weights")
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    torch.manual_seed(0)
    model = MODELS[name]()
    model.set_experts_implementation(implementation)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=[], target_parameters=names, r=2))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    # the Trainer does this under gradient checkpointing; the first projection then needs its weight in backward
    model.enable_input_require_grads()
    return model.train()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_weights_of_experts_with_lora_are_made_again(name: str, implementation: str) -> None:
    """Stock keeps the weights of all experts with what the adapter adds, batched ones for each token and choice."""
    stock = with_lora(name, implementation)
    ours = patch_model(copy.deepcopy(stock), CompressionConfig(loss_head=False))
    for model in (stock, ours):
        model(**BATCH).loss.backward()
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-7)
    bytes_kept = [kept_bytes(lambda model=model: model(**BATCH).loss) for model in (stock, ours)]
    copies = BATCH["input_ids"].numel() * CHOICES if implementation == "batched_mm" else EXPERTS
    assert bytes_kept[0] - bytes_kept[1] >= WEIGHTS * copies // EXPERTS


@pytest.mark.parametrize("name", MODELS)
def test_layers_have_plans_under_autocast(name: str) -> None:
    """PEFT computes these weights in fp32, without autocast."""
    stock = with_lora(name)
    ours = patch_model(copy.deepcopy(stock), CompressionConfig(loss_head=False))
    (loss, found), (expected_loss, expected) = (step(model, BATCH, "autocast") for model in (ours, stock))
    oracle = oracle_step(with_lora(name, "eager"), BATCH)
    assert torch.equal(loss, expected_loss)
    assert relative_error(found, oracle) <= EXACT * relative_error(expected, oracle)
    assert_all_ran(ours)


class Products(TorchDispatchMode):
    """Counts how often an adapter adds its part to a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.baddbmm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_weights_with_lora_are_made_once_for_all_their_parts(implementation: str) -> None:
    """Eager experts read one part of each weight for each expert."""
    ours = patch_model(with_lora("gpt_oss", implementation))
    loss = ours(**BATCH).loss
    with Products() as products:
        loss.backward()
    assert products.count == 2


def test_hooks_of_others_get_the_parts_of_a_weight_as_in_stock() -> None:
    """`save_on_cpu` would copy the whole weight for each expert otherwise."""
    stock = with_lora("gpt_oss", "eager")
    ours, packed = patch_model(copy.deepcopy(stock)), [0, 0]
    wanted = [p for p in ours.parameters() if p.requires_grad]
    expected = torch.autograd.grad(ours(**BATCH).loss, wanted)
    for i, model in enumerate((stock, ours)):

        def pack(x: Tensor, i: int = i) -> Tensor:
            packed[i] += x.nbytes
            return x.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = model(**BATCH).loss
    assert packed[1] < packed[0]
    assert_equal_bits(torch.autograd.grad(loss, wanted), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("which", [0, 1])
def test_a_merge_between_forward_and_backward_raises(implementation: str, which: int) -> None:
    """Of either of the two adapters, which are nested."""
    ours = patch_model(with_lora("gpt_oss", implementation))
    adapters = [m for m in ours.modules() if hasattr(m, "parameter_name")]
    loss = ours(**BATCH).loss
    adapters[which].merge()
    with pytest.raises(RuntimeError, match="merge adapters after the backward"):
        loss.backward()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_other_calls_of_experts_with_lora_write_nothing(mode: Callable[[], Any], implementation: str) -> None:
    """PEFT registers its adapters again in each call. A write into the weights is still found."""
    ours = patch_model(with_lora("gpt_oss", implementation), CompressionConfig(loss_head=False))
    wanted = [p for p in ours.parameters() if p.requires_grad]
    expected = torch.autograd.grad(ours(**BATCH).loss, wanted)
    loss = ours(**BATCH).loss
    with mode():
        ours(**BATCH)
        ours(**BATCH)
    assert_equal_bits(torch.autograd.grad(loss, wanted), expected)
    loss = ours(**BATCH).loss
    with torch.no_grad():
        next(p for name, p in ours.named_parameters() if name.endswith("gate_up_proj")).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_first_call_with_adapters_draws_no_numbers() -> None:
    """Otherwise the first forward of a process would have other dropout masks than stock's."""
    parametrizations._counted_writes.cache_clear()
    before = torch.get_rng_state()
    assert parametrizations._counted_writes(False) > 0
    assert torch.equal(torch.get_rng_state(), before)
