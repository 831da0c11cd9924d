"""Layers of many kinds run as programs: the bits of the leaf path, in every layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from hf_actcompress import CompressionConfig, kept_bytes, patch_model
from hf_actcompress.programs.layer import ProgramLayerMixin
from tests.programs.pairs import LEAVES, PROGRAMS

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
SEQ2SEQ = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip
PICTURES = {"image_size": 16, "patch_size": 4, "num_key_value_heads": 4}
KINDS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 8}, "olmo2": {}, "granite": {"residual_multiplier": 0.3, "embedding_multiplier": 2.0},
    "gpt_neox": {}, "phi": {}, "stablelm": {}, "starcoder2": {}, "smollm3": {}, "seed_oss": {"head_dim": 8},
    "exaone4": {}, "electra": {}, "xlm-roberta": {}, "camembert": {}, "bart": SEQ2SEQ,
    "clip_vision_model": PICTURES, "siglip_vision_model": PICTURES, "deit": PICTURES, "vit_mae": PICTURES,
    # these have norms of their own, scales, or interleaved angles
    "nemotron": {}, "olmo": {}, "dinov2": PICTURES, "cohere": {}, "cohere2": {}, "glm": {"head_dim": 8}, "ernie4_5": {},
    "arcee": {},
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


def gradients(model: Any, kind: str) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    torch.manual_seed(2)
    loss = model(**batch(kind)).last_hidden_state.square().mean()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits(kind: str) -> None:
    model = build(kind)
    leaves, programs = patch_model(copy.deepcopy(model), LEAVES), patch_model(model, PROGRAMS)
    layers = [layer for layer in programs.modules() if isinstance(layer, ProgramLayerMixin)]
    (expected, wanted), (loss, grads) = gradients(leaves, kind), gradients(programs, kind)
    assert torch.equal(loss, expected)
    assert all(g is wanted[name] is None or torch.equal(g, wanted[name]) for name, g in grads.items())
    # a decoder's layers that attend to an encoder go module by module
    expected_calls = [int("BartDecoder" not in type(layer).__name__) for layer in layers]
    assert [layer.actcompress.programs.calls for layer in layers] == expected_calls and 1 in expected_calls  # type: ignore[union-attr]


def test_a_decoder_of_which_the_cache_has_two_parts() -> None:
    """BART's decoder without states of an encoder has one attention, but its cache has parts for two."""
    results, model = [], build("bart")
    for bart in (copy.deepcopy(model), patch_model(model, PROGRAMS)):
        torch.manual_seed(2)
        output = bart.get_decoder()(input_ids=batch("bart")["input_ids"], use_cache=True)
        output.last_hidden_state.square().mean().backward()
        keys = [layer.keys for layer in output.past_key_values.self_attention_cache.layers]
        results.append([*keys, *(p.grad for p in bart.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) and all(map(torch.equal, *results))


@pytest.mark.parametrize("kind", ["olmo2", "gemma3_text"])
def test_sums_of_what_is_kept_are_made_again(kind: str) -> None:
    """The sum after the norm of attention's product. The leaf path keeps it, a tensor of the hidden size."""

    def kept(layers: int, config: CompressionConfig) -> int:
        options = {**SMALL, **KINDS[kind], "num_hidden_layers": layers}
        model = patch_model(AutoModel.from_config(AutoConfig.for_model(kind, **options)).train(), config)
        return kept_bytes(lambda: model(ids, use_cache=False).last_hidden_state, "cpu")

    ids = batch(kind)["input_ids"]
    leaves, programs = (kept(3, config) - kept(1, config) for config in (LEAVES, PROGRAMS))
    assert leaves - programs >= 2 * ids.numel() * SMALL["hidden_size"] * 4
