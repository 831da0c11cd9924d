"""`share_prompts`: what is kept of tokens that begin several sequences of a batch, and the gradients of that."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from hf_actcompress import CompressionConfig, kept_bytes, patch_model, patch_report
from hf_actcompress.codecs import IDENTITY
from hf_actcompress.errors import SharedRowsError, UnknownOptionError
from hf_actcompress.models.arguments import arguments
from hf_actcompress.models.rows_left_out import copies_of_call, why_not
from hf_actcompress.ops.heads import keep_heads, keep_row_heads
from hf_actcompress.records import Derived, dropping, frame, repeated_rows_of
from tests.oracle import assert_equal_bits
from tests.slopes import VOCAB, bert, gpt2, llama, slope

HIDDEN, GROUP, PROMPT, ANSWER = 64, 4, 24, 8
LENGTH = PROMPT + ANSWER
# the share of a group's rows that differ from each other
SHARE = (PROMPT + GROUP * ANSWER) / (GROUP * LENGTH)
pytestmark = pytest.mark.filterwarnings("ignore:.*lossy")


def group(padding: int = 0, prompts: int = 1) -> dict[str, Tensor]:
    """A batch of `prompts` prompts with GROUP completions each.

    Rows are padded on the left by `padding` tokens, and one row on the right, too.
    """
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
    """They are bit-equal, because these products compute equal rows from equal rows."""
    torch.manual_seed(0)
    model, batch = build(name, dtype), group(padding, prompts=2)
    whole = gradients(patch_model(copy.deepcopy(model), CompressionConfig()), batch)
    shared = gradients(patch_model(model, CompressionConfig(share_prompts=True)), batch)
    assert_equal_bits(shared, whole)


@pytest.mark.parametrize("codec", ["identity", "int8"])
@pytest.mark.parametrize("name", BUILDS)
def test_rows_of_prompts_are_kept_once(name: str, codec: str) -> None:
    roles = dict.fromkeys(("linear", "norm", "mlp", "attention"), codec)

    def kept(share: bool) -> float:
        config = CompressionConfig(share_prompts=share, **roles)
        return slope(BUILDS[name], batch=group(), prepare=lambda model: patch_model(model, config)).kept

    whole, shared = kept(False), kept(True)
    # the statistics of norms are kept for all rows
    assert shared == pytest.approx(SHARE * whole, rel=0.08)


def test_a_batch_without_repetitions_keeps_the_same() -> None:
    model, batch = build("llama"), group()
    batch["input_ids"] = torch.randint(3, VOCAB, batch["input_ids"].shape)
    kept = [
        kept_bytes(lambda: model(**batch), "cpu")
        for share in (False, True)
        if patch_model(model, CompressionConfig(share_prompts=share))
    ]
    assert kept[0] == kept[1]


DIFFERENT = {
    "dropout": (lambda: gpt2(2, hidden=HIDDEN, resid_pdrop=0.01, embd_pdrop=0.0), "resid_dropout"),
    "dropout by a function": (lambda: llama(2, hidden=HIDDEN, attention_dropout=0.1), "attention_dropout"),
    "both directions": (lambda: bert(2, hidden=HIDDEN, hidden_dropout_prob=0.0), "see what follows"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_models_that_make_rows_differ_are_refused(name: str) -> None:
    build, reason = DIFFERENT[name]
    model = patch_model(build().train(), CompressionConfig(share_prompts=True))
    with pytest.raises(SharedRowsError, match=reason):
        model(**group())
    # in eval mode nothing draws random numbers
    if name != "both directions":
        model.eval()(**group()).loss.backward()


def test_what_nobody_knew_raises_in_backward() -> None:
    model = patch_model(build("llama"), CompressionConfig(share_prompts=True))
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, args, out: out * (1 + torch.rand_like(out)))
    loss = model(**group()).loss
    with pytest.raises(SharedRowsError, match="share_prompts=False"):
        loss.backward()


def test_other_inputs_keep_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples: pictures behind equal placeholders, embeddings, masks that the caller made, and a filled cache."""
    model, ids = build("llama"), group()["input_ids"]
    more: list[dict[str, Any]] = [
        {"inputs_embeds": torch.ones(GROUP, LENGTH, HIDDEN)},
        {"pixel_values_videos": torch.ones(1)},
        {"image_sizes": [torch.ones(1)]},
        {"attention_mask": {"full_attention": torch.ones(1)}},
        {"attention_mask": torch.ones(GROUP, 1, LENGTH, LENGTH)},
        {"position_ids": torch.ones(3, GROUP, LENGTH)},
        {"past_key_values": (torch.ones(1),)},
    ]
    given = arguments(model.forward, (ids,), {"labels": ids, "use_cache": True})
    assert copies_of_call(model, given) is not None
    for kwargs in more:
        assert copies_of_call(model, {"input_ids": ids, **kwargs}) is None
        assert copies_of_call(model, arguments(model.forward, (ids,), kwargs)) is None


def test_statistics_of_another_shape_stay_whole() -> None:
    """Packed kernels have such statistics."""
    q = torch.randn(GROUP, 2, LENGTH, 8)
    copies = repeated_rows_of([group()["input_ids"]])
    with frame(), dropping(copies):
        records, fewer = keep_heads(q, q, q, None, True, IDENTITY)
        assert fewer and all(isinstance(record, Derived) for record in records)
        assert isinstance(keep_row_heads(q.logsumexp(-1), True), Derived)


def test_rows_of_an_encoder_decoder_are_kept_and_reported() -> None:
    sizes = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    report = patch_report(patch_model(model, CompressionConfig(share_prompts=True)))
    assert [row.reason for row in report.rows if row.role == "shared_prompts"] == [why_not(model)]


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
