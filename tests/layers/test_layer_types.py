"""Layers of many kinds run by plans: stock's bits, in every layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from hf_actcompress import CompressionConfig, kept_bytes, patch_model
from tests.layers.plans import LEAVES, PLANS, calls, patched

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
SEQ2SEQ = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0,
    "use_cache": False,
}  # fmt: skip
PICTURES = {"image_size": 16, "patch_size": 4, "num_key_value_heads": 4}
KINDS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 8}, "olmo2": {}, "granite": {"residual_multiplier": 0.3, "embedding_multiplier": 2.0},
    "gpt_neox": {}, "phi": {}, "stablelm": {}, "starcoder2": {}, "smollm3": {}, "seed_oss": {"head_dim": 8},
    "exaone4": {}, "electra": {}, "xlm-roberta": {}, "camembert": {}, "bart": SEQ2SEQ,
    "clip_vision_model": PICTURES, "siglip_vision_model": PICTURES, "deit": PICTURES, "vit_mae": PICTURES,
    # these have norms of their own, scales, interleaved angles, or angles of which a layer takes halves
    "nemotron": {}, "olmo": {}, "dinov2": PICTURES, "cohere": {}, "cohere2": {}, "glm": {"head_dim": 8}, "ernie4_5": {},
    "arcee": {}, "roformer": {"embedding_size": 32},
}  # fmt: skip


def build(kind: str) -> Any:
    torch.manual_seed(0)
    return AutoModel.from_config(AutoConfig.for_model(kind, **{**SMALL, **KINDS[kind]})).train()


def batch(kind: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 90, (2, 9), generator=generator)
    if KINDS[kind] is PICTURES:
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    return {"input_ids": ids, "attention_mask": (torch.arange(9) < torch.tensor([[9], [6]])).long()}


def kept_by_two_layers(kind: str, config: CompressionConfig) -> int:
    """The bytes that two further layers keep. Without dropout: on a CPU, masks of few elements are kept in bytes."""
    kept = []
    for layers in (1, 3):
        options = {**SMALL, **KINDS[kind], "num_hidden_layers": layers}
        model = patched(AutoModel.from_config(AutoConfig.for_model(kind, **options)).train(), config)
        for module in model.modules():
            for rate in ("p", "dropout"):
                if type(getattr(module, rate, None)) is float:
                    setattr(module, rate, 0.0)
        kept.append(kept_bytes(lambda model=model: model(**batch(kind)).last_hidden_state, "cpu"))
    return kept[1] - kept[0]


def gradients(model: Any, kind: str) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    torch.manual_seed(2)
    loss = model(**batch(kind)).last_hidden_state.square().mean()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits(kind: str) -> None:
    model = build(kind)
    stock, plans = copy.deepcopy(model), patch_model(model, PLANS)
    (expected, wanted), (loss, grads) = gradients(stock, kind), gradients(plans, kind)
    assert torch.equal(loss, expected)
    assert all(g is wanted[name] is None or torch.equal(g, wanted[name]) for name, g in grads.items())
    assert calls(plans) == [1] * len(calls(plans)) != []


@pytest.mark.parametrize("kind", KINDS)
def test_no_more_bytes_than_module_by_module(kind: str) -> None:
    leaves, plans = (kept_by_two_layers(kind, config) for config in (LEAVES, PLANS))
    # of Cohere's norm, a plan keeps two statistics
    assert plans <= (1.01 if kind.startswith("cohere") else 1.0) * leaves
    if kind in ("olmo2", "gemma3_text"):
        # the two sums behind the norms of products, which the leaf path keeps
        # of two layers in turn one; recomputed from layer to layer, all would be there at once in backward
        assert leaves - plans >= (2 * 2 * 18 * SMALL["hidden_size"] * 4) / 2


def test_a_decoder_of_which_the_cache_has_two_parts() -> None:
    """BART's decoder without states of an encoder has one attention, but its cache has parts for two."""
    model = build("bart")
    stock, plans = copy.deepcopy(model), patch_model(model, PLANS)
    results = []
    for bart in (stock, plans):
        torch.manual_seed(2)
        output = bart.get_decoder()(input_ids=batch("bart")["input_ids"], use_cache=True)
        output.last_hidden_state.square().mean().backward()
        keys = [layer.keys for layer in output.past_key_values.self_attention_cache.layers]
        results.append([*keys, *(p.grad for p in bart.parameters() if p.grad is not None)])
        bart.config.use_cache = True
    assert len(results[0]) == len(results[1]) and all(map(torch.equal, *results))
    before = calls(plans)
    (expected, wanted), (loss, grads) = gradients(stock, "bart"), gradients(plans, "bart")
    assert torch.equal(loss, expected)
    torch.testing.assert_close(grads, wanted)
    assert [now - then for now, then in zip(calls(plans), before, strict=True)] == [1, 1, 1, 1]
