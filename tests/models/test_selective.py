"""Which modules of real models run again in backward: with the caches that they make, adapters, checkpointing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from hf_actcompress import CompressionConfig, kept_bytes, patch_model, patch_report, unpatch_model
from tests.oracle import assert_equal_bits

pytestmark = pytest.mark.daily(2)

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
IDS = torch.arange(2 * 40).view(2, 40) % 60 + 3


def bert(**options: Any) -> Any:
    return hf.BertForMaskedLM(hf.BertConfig(**SMALL, intermediate_size=64, attn_implementation="eager", **options))


def llama() -> Any:
    config = hf.LlamaConfig(**SMALL, num_key_value_heads=2, intermediate_size=64, attn_implementation="eager")
    return hf.LlamaForCausalLM(config)


def falcon() -> Any:
    return hf.FalconForCausalLM(hf.FalconConfig(**SMALL, new_decoder_architecture=True, num_kv_heads=2))


def bloom() -> Any:
    return hf.BloomForCausalLM(hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4))


def falcon_h1() -> Any:
    config = hf.FalconH1Config(
        **SMALL, num_key_value_heads=2, intermediate_size=64, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8,
        mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=16,
    )  # fmt: skip
    return hf.FalconH1ForCausalLM(config)


def big_bird() -> Any:
    config = hf.BigBirdConfig(**SMALL, intermediate_size=64, block_size=4, num_random_blocks=1)
    return hf.BigBirdForMaskedLM(config)


def prophet() -> Any:
    config = hf.ProphetNetConfig(
        vocab_size=64, hidden_size=32, encoder_ffn_dim=64, num_encoder_layers=1, num_encoder_attention_heads=4,
        decoder_ffn_dim=64, num_decoder_layers=1, num_decoder_attention_heads=4, num_buckets=8,
    )  # fmt: skip
    return hf.ProphetNetForConditionalGeneration(config)


def esm() -> Any:
    """Its GELU is written out in products and erf."""
    return hf.EsmForMaskedLM(hf.EsmConfig(**SMALL, intermediate_size=128, pad_token_id=1, mask_token_id=2))


# the modules that run again, and the largest share of stock's kept bytes that the model may keep
CASES: dict[str, tuple[Callable[[], Any], str, float]] = {
    "bert": (bert, "BertSelfAttention", 0.32),
    "llama": (llama, "LlamaAttention", 0.41),
    "falcon": (falcon, "FalconAttention", 0.51),
    "bloom": (bloom, "BloomAttention", 0.53),
    "falcon_h1": (falcon_h1, "FalconH1Mixer", 0.28),
    "esm": (esm, "EsmIntermediate", 0.32),
    "prophetnet": (prophet, "ProphetNetAttention", 0.37),
}


def made(build: Callable[[], Any], **options: Any) -> Any:
    torch.manual_seed(0)
    return build(**options).train()


def gradients(model: Any, **inputs: Any) -> list[Tensor]:
    torch.manual_seed(4)
    out = model(input_ids=IDS, **inputs)
    # the loss is computed here because the fused loss is not bit-equal to stock's
    (out.logits.float().square().sum() / 1000).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def selected(model: Any) -> set[str]:
    return {row.module for row in patch_report(model).rows if row.role == "selective" and not row.note}


def inputs_of(model: Any) -> dict[str, Any]:
    return {"decoder_input_ids": IDS[:, :17]} if model.config.is_encoder_decoder else {}


@pytest.mark.parametrize("name", CASES)
def test_the_code_between_products_runs_again(name: str) -> None:
    """The forward makes a cache, as every training forward does if the config asks for one."""
    build, module, share = CASES[name]
    more = inputs_of(stock := made(build))
    # by plans, what does not run again keeps less than it does here
    configs = (CompressionConfig(selective=on) for on in (True, False))
    ours, off = (patch_model(copy.deepcopy(stock), config) for config in configs)
    assert_equal_bits(gradients(ours, **more), gradients(off, **more))
    assert module in selected(ours)
    kept = [kept_bytes(lambda m=m: m(input_ids=IDS, **more).logits, "cpu") for m in (ours, off, stock)]
    # Falcon's code calls torch's fused attention: a plan keeps its output, and no product of activations in either case
    assert (kept[0] < kept[1] if name != "falcon" else kept[0] == kept[1]) and kept[0] < share * kept[2]


def test_a_filled_cache_is_stocks_business() -> None:
    results = []
    for selective in (False, True):
        model = patch_model(made(llama), CompressionConfig(selective=selective))
        gradients(model)
        model.zero_grad()
        with torch.no_grad():
            before = model(IDS[:, :20]).past_key_values
        model(IDS[:, 20:], past_key_values=before).logits.square().sum().backward()
        results.append([p.grad for p in model.parameters()])
    assert_equal_bits(*results)


def test_random_blocks_are_stocks() -> None:
    """numpy draws the blocks that BigBird attends to. A second run would draw other blocks, so there is none."""
    import numpy

    results = []
    for selective in (False, True):
        model = patch_model(made(big_bird), CompressionConfig(selective=selective))
        numpy.random.seed(2)
        results.append(gradients(model))
    assert_equal_bits(*results)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_adapters(dropout: float) -> None:
    """Base and adapter have one output, which is kept. With dropout, the products of both are kept, but no mask."""
    peft = pytest.importorskip("peft")
    results, kept = [], {}
    for how in ("stock", "off", "on"):
        config = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout)
        torch.manual_seed(1)
        model = peft.get_peft_model(made(bert), config)
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.data = torch.linspace(-0.1, 0.1, p.numel()).view(p.shape)
        if how != "stock":
            patch_model(model, CompressionConfig(selective=how == "on", loss_head=False))
        results.append(gradients(model))
        kept[how] = kept_bytes(lambda model=model: model(input_ids=IDS).logits, "cpu")
    assert_equal_bits(results[2], results[1])
    assert kept["on"] < 0.8 * kept["off"] < 0.8 * kept["stock"]
    assert "BertSelfAttention" in selected(model)


@pytest.mark.parametrize("then", ["unpatched", "patched otherwise"])
def test_a_model_may_be_unpatched_before_the_backward(then: str) -> None:
    """The second run uses the module as it was patched, even if it has changed since, and leaves it unchanged."""
    results = []
    for ours in (False, True):
        model = made(falcon)
        if ours:
            patch_model(model)
        loss = model(input_ids=IDS).logits.square().sum()
        if ours and then == "unpatched":
            unpatch_model(model)
        elif ours:
            patch_model(model, CompressionConfig(selective=False, derive_linear=False))
        classes = [type(module) for module in model.modules()]
        loss.backward()
        assert classes == [type(module) for module in model.modules()]
        results.append([p.grad for p in model.parameters()])
    assert_equal_bits(results[1], results[0])


def test_checkpointed_layers() -> None:
    stock = made(bert)
    ours = patch_model(copy.deepcopy(stock), CompressionConfig(loss_head=False))
    for model in (stock, ours):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_equal_bits(gradients(ours), gradients(stock))


def test_attentions_are_returned() -> None:
    stock = made(bert)
    ours = patch_model(copy.deepcopy(stock), CompressionConfig(loss_head=False))
    for _ in range(2):
        torch.manual_seed(0)
        expected = stock(IDS, output_attentions=True)
        torch.manual_seed(0)
        found = ours(IDS, output_attentions=True)
        assert_equal_bits(found.attentions, expected.attentions)
    for out in (found, expected):
        sum(a.square().sum() for a in out.attentions).backward()
    grads = [[p.grad for p in model.parameters() if p.grad is not None] for model in (ours, stock)]
    assert_equal_bits(*grads)
