"""`share_prompts`: what is kept of tokens that begin several sequences of a batch, and the gradients of that."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_actcompress import CompressionConfig, kept_bytes, patch_model
from hf_actcompress.errors import SharedRowsError, UnknownOptionError
from tests.oracle import assert_equal_bits
from tests.slopes import VOCAB, bert, gpt2, llama, slope

HIDDEN, GROUP, PROMPT, ANSWER = 64, 4, 24, 8
LENGTH = PROMPT + ANSWER
# of the rows of a group, those that differ
SHARE = (PROMPT + GROUP * ANSWER) / (GROUP * LENGTH)
pytestmark = pytest.mark.filterwarnings("ignore:.*lossy")


def group(padding: int = 0, prompts: int = 1) -> dict[str, Tensor]:
    """So many prompts with a group of completions each; with padding on the left and on the right."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.cat(
        [
            torch.randint(3, VOCAB, (prompts, 1, PROMPT), generator=draw).expand(-1, GROUP, -1),
            torch.randint(3, VOCAB, (prompts, GROUP, ANSWER), generator=draw),
        ],
        dim=-1,
    ).flatten(0, 1)
    batch = {"input_ids": ids, "labels": ids.clone()}
    batch["labels"][:, :PROMPT] = -100
    if padding:
        mask = torch.ones_like(ids)
        mask[:, :padding] = mask[1, -padding:] = 0
        batch |= {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}
    return batch


BUILDS = {
    "llama": partial(llama, hidden=HIDDEN),
    "gpt2": partial(gpt2, hidden=HIDDEN, resid_pdrop=0.0, embd_pdrop=0.0),
}


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return BUILDS[name](2).to(dtype).train()


def gradients(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    model.zero_grad()
    model(**batch).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BUILDS)
def test_gradients_are_those_of_all_rows(name: str, dtype: torch.dtype, padding: int) -> None:
    """Bit by bit: equal rows of these products are equal."""
    torch.manual_seed(0)
    model, batch = build(name, dtype), group(padding, prompts=2)
    whole = gradients(patch_model(copy.deepcopy(model), CompressionConfig(programs=False)), batch)
    shared = gradients(patch_model(model, CompressionConfig(share_prompts=True)), batch)
    assert_equal_bits(shared, whole)


@pytest.mark.parametrize("codec", ["identity", "int8"])
@pytest.mark.parametrize("name", BUILDS)
def test_rows_of_prompts_are_kept_once(name: str, codec: str) -> None:
    roles = dict.fromkeys(("linear", "norm", "mlp", "attention"), codec)

    def kept(share: bool) -> float:
        config = CompressionConfig(share_prompts=share, programs=False, **roles)
        return slope(BUILDS[name], batch=group(), prepare=lambda model: patch_model(model, config)).kept

    whole, shared = kept(False), kept(True)
    # statistics of norms are whole
    assert shared == pytest.approx(SHARE * whole, rel=0.08)


def test_a_batch_without_repetitions_keeps_the_same() -> None:
    model, batch = build("llama"), group()
    batch["input_ids"] = torch.randint(3, VOCAB, batch["input_ids"].shape)
    kept = [
        kept_bytes(lambda: model(**batch), "cpu")
        for share in (False, True)
        if patch_model(model, CompressionConfig(share_prompts=share, programs=False))
    ]
    assert kept[0] == kept[1]


def test_rows_that_differ_raise() -> None:
    """With a dropout mask of their own, or under attention in both directions."""
    config = CompressionConfig(share_prompts=True)
    drawing = gpt2(2, hidden=HIDDEN, resid_pdrop=0.5).train()
    both_ways = bert(2, hidden=HIDDEN).train()
    for model in (drawing, both_ways):
        torch.manual_seed(0)
        loss = patch_model(model, config)(**group()).loss
        with pytest.raises(SharedRowsError, match="share_prompts=False"):
            loss.backward()


def test_under_checkpointing_all_rows_of_a_layer_are_kept() -> None:
    model, batch = build("llama"), group()
    expected = gradients(copy.deepcopy(model), batch)
    model.gradient_checkpointing_enable()
    found = gradients(patch_model(model, CompressionConfig(share_prompts=True)), batch)
    for ours, stock in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("other", [{"drop_padding": True}, {"tokens": 0.5}])
def test_it_goes_alone(other: dict[str, Any]) -> None:
    with pytest.raises(UnknownOptionError, match="share_prompts"):
        CompressionConfig(share_prompts=True, **other)
