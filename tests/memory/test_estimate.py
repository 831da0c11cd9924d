"""Estimates, compared with the CPU allocator's events of the real step.

An estimate runs all layers of a model that has few of them. Otherwise it runs two to four layers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model

from hf_actcompress import PRESETS, CompressionConfig, kept_bytes, measure_step, patch_model
from hf_actcompress.memory import estimate
from hf_actcompress.memory.estimation.estimates import Estimates
from tests.slopes import bert, gpt2, llama

BF16, FP32 = torch.bfloat16, torch.float32
HIDDEN, FEW, LAYERS = 128, 2, 6
BUILDS = {
    "bert": partial(bert, hidden=HIDDEN),
    "gpt2": partial(gpt2, hidden=HIDDEN, bos_token_id=0, eos_token_id=0),
    "llama": partial(llama, hidden=HIDDEN, pad_token_id=0),
}


def lora(dropout: float = 0.0) -> LoraConfig:
    return LoraConfig(r=8, target_modules="all-linear", lora_dropout=dropout)


def real(
    model: Any,
    config: str,
    batch: int,
    length: int,
    adapters: LoraConfig | None = None,
    checkpointing: bool = False,
    autocast: torch.dtype | None = None,
) -> tuple[int, int]:
    """(kept, peak) of a step while old gradients exist, by the allocator."""
    model = get_peft_model(model, adapters) if adapters is not None else model
    if checkpointing:
        model.gradient_checkpointing_enable()
    if config != "stock":
        patch_model(model, config)
    ids = torch.randint(3, model.config.vocab_size, (batch, length))

    def forward() -> Any:
        # as usual, autocast is around the forward only: it keeps its casts of the weights until it ends
        with torch.autocast("cpu", autocast or BF16, enabled=autocast is not None):
            return model.train()(input_ids=ids, labels=ids)

    def step() -> None:
        forward().loss.backward()

    kept = kept_bytes(forward, "cpu")
    step()
    return kept, measure_step(step, "cpu").peak_bytes


def check(
    family: str,
    config: str,
    dtype: torch.dtype = FP32,
    batch: int = 2,
    length: int = 128,
    adapters: LoraConfig | None = None,
    checkpointing: bool = False,
    layers: int = LAYERS,
    tolerance: float = 0.05,
    **options: Any,
) -> None:
    built = BUILDS[family](layers, **options).to(dtype)
    found = estimate(
        built,
        batch_size=batch,
        seq_len=length,
        config=config,
        lora=adapters,
        gradient_checkpointing=checkpointing,
        device="cpu",
    )
    kept, peak = real(built, config, batch, length, adapters, checkpointing)
    print(f"kept {found.kept_bytes} for {kept}, peak {found.step_peak_bytes} for {peak}")
    assert found.kept_bytes == pytest.approx(kept, rel=0.01)
    assert found.step_peak_bytes == pytest.approx(peak, rel=tolerance)
    assert sum(found.kept_by_role.values()) == found.kept_bytes


@pytest.mark.daily(4)
@pytest.mark.parametrize("config", ["stock", *PRESETS])
def test_every_preset(config):
    check("bert", config, layers=FEW)


@pytest.mark.parametrize("config", ["stock", "exact", "int8", "offload", "sampled"])
def test_presets_in_half_precision(config):
    check("llama", config, BF16, layers=FEW)


@pytest.mark.daily(2)
@pytest.mark.parametrize(("config", "layers"), [("stock", LAYERS), ("exact", LAYERS), ("tempo", FEW), ("int4", FEW)])
def test_gpt2(config, layers):
    check("gpt2", config, layers=layers)


@pytest.mark.daily(3)
@pytest.mark.parametrize("config", ["stock", "exact"])
@pytest.mark.parametrize("family", BUILDS)
def test_checkpointing(family, config):
    check(family, config, checkpointing=True, layers=LAYERS if config == "exact" else FEW)


@pytest.mark.daily(4)
@pytest.mark.parametrize("config", ["stock", "exact", "int8"])
@pytest.mark.parametrize(
    ("dtype", "dropout", "checkpointing"), [(BF16, 0.0, False), (BF16, 0.05, False), (BF16, 0.0, True)]
)
def test_lora(config, dtype, dropout, checkpointing):
    layers = LAYERS if config == "exact" else FEW
    check("llama", config, dtype, adapters=lora(dropout), checkpointing=checkpointing, layers=layers)


@pytest.mark.parametrize(("batch", "length"), [(1, 512), (8, 32)])
@pytest.mark.parametrize(("family", "config"), [("bert", "stock"), ("gpt2", "exact"), ("llama", "exact")])
def test_batch_and_sequence_sizes(family, config, batch, length):
    check(family, config, batch=batch, length=length, layers=FEW)


@pytest.mark.parametrize("family", BUILDS)
def test_an_evaluation(family):
    """Its outputs are held, such as logits and caches. Layers that are not run add as much as those that are run."""
    built = BUILDS[family](LAYERS).eval()
    several = Estimates(built, device="cpu")
    ids = torch.randint(3, built.config.vocab_size, (2, 128))

    def step() -> None:
        with torch.no_grad():
            held = built(input_ids=ids, labels=ids)
        del held

    step()
    found = several.evaluation_bytes(2, 128) - sum(p.nbytes for p in built.parameters()) * 4
    assert found == pytest.approx(measure_step(step, "cpu").peak_bytes, rel=0.05)


def test_attention_dropout_takes_the_path_of_a_cpu():
    # with dropout a CPU computes attention op by op, and keeps the probabilities
    build = partial(gpt2, hidden=HIDDEN, bos_token_id=0, eos_token_id=0, attn_pdrop=0.1)
    model = build(FEW)
    found = estimate(model, batch_size=2, seq_len=128, config="stock", device="cpu")
    kept, peak = real(model, "stock", 2, 128)
    assert found.kept_bytes == pytest.approx(kept, rel=0.01)
    assert found.step_peak_bytes == pytest.approx(peak, rel=0.05)


def test_shared_prompts_are_estimated_as_if_there_were_none():
    model, options = BUILDS["llama"](FEW), {"batch_size": 4, "seq_len": 32}
    found = estimate(model, config=CompressionConfig(share_prompts=True), **options)
    alone = estimate(model, config=CompressionConfig(), **options)
    assert (found.kept_bytes, found.step_peak_bytes) == (alone.kept_bytes, alone.step_peak_bytes)
    assert any("share_prompts" in note for note in found.notes) and not alone.notes


# models whose heads all read one key: its memory layout is also that of its transpose, or it is broadcast to all heads
ONE_KEY: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (hf.LlamaForCausalLM, {"num_key_value_heads": 1, "intermediate_size": 256}),
    "gemma3": (hf.Gemma3ForCausalLM, {"num_key_value_heads": 1, "intermediate_size": 256, "head_dim": 32}),
    "gpt_bigcode": (hf.GPTBigCodeForCausalLM, {"attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}),
    "falcon": (hf.FalconForCausalLM, {"bos_token_id": 0, "eos_token_id": 0}),
}


@pytest.mark.daily(3)
@pytest.mark.parametrize("name", ONE_KEY)
def test_heads_that_share_one_key(name: str) -> None:
    cls, options = ONE_KEY[name]
    sizes = {"vocab_size": 500, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    for config in ("stock", "exact"):
        model = cls(cls.config_class(**{**sizes, **options}, use_cache=False)).to(BF16)
        found = estimate(model, batch_size=2, seq_len=96, config=config, device="cpu")
        kept, peak = real(model, config, 2, 96)
        print(name, config, found.kept_bytes / kept, found.step_peak_bytes / peak)
        assert found.kept_bytes == pytest.approx(kept, rel=0.01)
        assert found.step_peak_bytes == pytest.approx(peak, rel=0.05)
