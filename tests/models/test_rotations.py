"""Rotary embeddings that are not Llama's, behind norms of queries and keys: the same bits, and less is kept."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.laguna import modeling_laguna
from transformers.models.olmo2 import modeling_olmo2

from hf_actcompress import patch_model
from hf_actcompress.models import rope
from hf_actcompress.models.rotations import is_rotation, rotation_of
from tests.families import BODY, MODES, differing, step
from tests.oracle import kept_bytes
from tests.sweep.batches import find_batch, with_labels
from tests.sweep.catalogue import Pair
from tests.sweep.pair import Subject

# laguna rotates a part of each head, olmo2 rounds differently, gemma4 rotates one tensor per call
CLASSES = {"laguna": "LagunaForCausalLM", "olmo2": "Olmo2ForCausalLM", "gemma4_text": "Gemma4ForCausalLM"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CLASSES)
def test_same_bits_and_less_is_kept(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(name, CLASSES[name], "tokens")
    model = Subject(pair, {}).build()
    batch = with_labels(model, find_batch(model, name, "tokens"), "tokens")
    model = patch_model(model.to(torch.bfloat16) if mode == "bf16" else model, replace(BODY, plans=False))

    def found() -> tuple[Any, Any, int]:
        return *step(model, batch, mode), kept_bytes(lambda: model(**batch).loss)

    loss, gradients, ours = found()
    monkeypatch.setattr(rope.GlobalsCopy, "is_of", lambda self, stock_class: False)
    expected, stock, without = found()
    assert torch.equal(loss, expected) and gradients and not differing(gradients, stock)
    # saved are at least the queries and keys of one layer, 16 numbers in each of 4 heads
    assert ours <= without - batch["input_ids"].numel() * 4 * 16 * (2 if mode == "bf16" else 4)


@pytest.mark.parametrize(
    ("file", "attention", "name"),
    [
        ("glm_ocr", "GlmOcrVisionAttention", "apply_rotary_pos_emb_vision"),
        ("minimax_m2", "MiniMaxM2Attention", "apply_rotary_pos_emb"),
        # these have no norm
        ("phi3", "Phi3Attention", None),
        ("bert", "BertSelfAttention", None),
    ],
)
def test_which_classes_have_one(file: str, attention: str, name: str | None) -> None:
    found = rotation_of(getattr(import_module(f"transformers.models.{file}.modeling_{file}"), attention))
    assert (found and found[0]) == name


def mixed(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """The keys depend on the queries."""
    q, k = modeling_olmo2.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
    return q, k * q.mean()


def curved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """The gradient depends on the values."""
    q, k = modeling_olmo2.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
    return q.square(), k.square()


def writing(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    rotated = modeling_olmo2.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
    q.data.add_(1)
    return rotated


def view(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    return q[:], k[:]


@pytest.mark.parametrize("function", [mixed, curved, writing, view, print])
def test_what_is_none(function: Any) -> None:
    assert is_rotation(modeling_olmo2.apply_rotary_pos_emb) and is_rotation(modeling_laguna.apply_rotary_pos_emb)
    assert not is_rotation(function)
