"""Bytes kept for backward, counted on the allocator. Units: bytes per token per layer over the hidden size.

Most rows run at h = 512, where what does not grow with h (statistics, RNG states, low ranks) weighs more than at the
sizes that the limits are stated for (768 and 1024), so that meeting a limit here is the harder task.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_actcompress import patch_model
from tests.slopes import BATCH, VOCAB, bert, gpt2, llama, slope

pytestmark = pytest.mark.daily(2)

BF16, FP32 = torch.bfloat16, torch.float32


def lora(model: Any, dropout: float = 0.0) -> Any:
    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", lora_dropout=dropout))


def lora_then_patch(model: Any, dropout: float = 0.0) -> Any:
    return patch_model(lora(model, dropout))


def patch_then_lora(model: Any, dropout: float = 0.0) -> Any:
    return lora(patch_model(model), dropout)


BUILDS = {
    "bert": bert,
    "gpt2": gpt2,
    "gpt2-tanh": partial(gpt2, activation_function="gelu_pytorch_tanh"),
    "llama": llama,
}
BUILDS["gpt2-new"] = partial(gpt2, activation_function="gelu_new")


@lru_cache
def kept(model: str, dtype: torch.dtype, prepare: Any = None, autocast: bool = False, hidden: int = 512) -> float:
    build = partial(BUILDS[model], hidden=hidden)
    return slope(build, dtype, prepare=prepare or (lambda stock: stock), autocast=autocast).kept


# a check of the measurement: stock's figures are those of a count of the saved tensors by hand. For BERT in bf16 that
# is 36 h, and mean, rstd and logsumexp
STOCK = [
    ("bert", BF16, None, 36.07),
    ("gpt2-new", BF16, None, 60.07),
    ("gpt2-tanh", BF16, None, 36.07),
    ("llama", BF16, None, 49.07),
    ("llama", BF16, lora, 72.29),
    ("llama", BF16, partial(lora, dropout=0.05), 110.29),
    ("bert", FP32, None, 72.08),
    ("gpt2-new", FP32, None, 120.08),
    ("llama", FP32, None, 90.07),
]

LIMITS = [
    ("bert", BF16, patch_model, 20.5),
    ("gpt2-new", BF16, patch_model, 20.5),
    ("gpt2-tanh", BF16, patch_model, 20.5),
    ("llama", BF16, patch_model, 23.5),
    ("llama", BF16, lora_then_patch, 24.5),
    ("llama", BF16, patch_then_lora, 24.5),
    ("llama", BF16, partial(lora_then_patch, dropout=0.05), 24.7),
    ("bert", FP32, patch_model, 2.05 * 20),
    ("gpt2-new", FP32, patch_model, 2.05 * 20),
    ("llama", FP32, patch_model, 2.05 * 23),
]


@pytest.mark.parametrize(("model", "dtype", "prepare", "figure"), STOCK)
def test_the_ruler_measures_what_stock_is_known_to_keep(model, dtype, prepare, figure):
    assert kept(model, dtype, prepare) == pytest.approx(figure, rel=0.005)


@pytest.mark.parametrize(("model", "dtype", "prepare", "limit"), LIMITS)
def test_patched_models_keep_the_floor(model, dtype, prepare, limit):
    assert kept(model, dtype, prepare) <= limit


@pytest.mark.parametrize(
    ("model", "hidden", "figure"), [("bert", 768, 20.075), ("gpt2-new", 768, 20.075), ("llama", 1024, 23.07)]
)
def test_the_floor_at_full_size(model, hidden, figure):
    assert kept(model, BF16, patch_model, hidden=hidden) == pytest.approx(figure, abs=0.01)


@pytest.mark.parametrize(("model", "limit"), [("bert", 25.0), ("gpt2-new", 25.0), ("llama", 27.5)])
def test_autocast_with_fp32_weights(model, limit):
    # a bf16 copy of the weights would add 12 (BERT, GPT-2) or 13 (Llama) at this size and number of tokens
    assert kept(model, FP32, patch_model, autocast=True) <= limit


def saved_weight_copies(model: Any) -> int:
    """How many saved tensors have a weight's shape, in either layout, and are not a weight."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shapes = {tuple(sorted(p.shape)) for p in model.parameters() if p.dim() == 2}
    copies: set[int] = set()

    def pack(x: torch.Tensor) -> torch.Tensor:
        address = x.untyped_storage().data_ptr()
        if x.dim() == 2 and tuple(sorted(x.shape)) in shapes and address not in weights:
            copies.add(address)
        return x

    # 1 x 37 tokens: no activation has a weight's shape
    ids = torch.arange(37).unsqueeze(0) % VOCAB
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), torch.autocast("cpu", dtype=BF16):
        loss = model(input_ids=ids, labels=ids).loss
    assert loss.isfinite()
    return len(copies)


@pytest.mark.parametrize("model", ["bert", "gpt2-new", "llama"])
def test_autocast_keeps_no_copies_of_weights(model):
    built = BUILDS[model](2, 128).train()
    assert saved_weight_copies(built) >= 2 * 4
    assert saved_weight_copies(patch_model(built)) == 0


@pytest.mark.parametrize("model", ["bert", "gpt2-new", "llama"])
def test_peak_of_forward_and_backward_falls_with_what_is_kept(model):
    build = partial(BUILDS[model], hidden=256)
    stock, ours = slope(build, peak=True, length=192), slope(build, prepare=patch_model, peak=True, length=192)
    # only kept bytes grow with the depth, and the workspace of one layer's backward does not. The 5% allow for an
    # allocation that is alive at one model's peak and not at the other's
    assert stock.peak - ours.peak >= 0.95 * (stock.kept - ours.kept)


def checkpointed(model: Any, order: str) -> Any:
    if order == "patched, then checkpointing":
        patch_model(model)
    model.gradient_checkpointing_enable()
    if order == "checkpointing, then patched":
        patch_model(model)
    return model


@pytest.mark.parametrize("order", ["stock", "patched, then checkpointing", "checkpointing, then patched"])
@pytest.mark.parametrize("model", ["bert", "gpt2-new", "llama"])
def test_under_gradient_checkpointing_a_layer_keeps_its_input(model, order):
    build = partial(BUILDS[model], hidden=256)
    # a layer keeps its bf16 input, 2 h, and the generator's state, 0.02 h at this size: stock once, BERT and GPT-2 by
    # plans for each of two dropouts, Llama by plans never
    states = 1 if order == "stock" else 0 if model == "llama" else 2
    share = torch.get_rng_state().numel() / (BATCH * 512 * 256)
    assert slope(build, prepare=partial(checkpointed, order=order)).kept == pytest.approx(
        2.0 + states * share, abs=0.005
    )
