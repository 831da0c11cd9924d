"""Losses outside of the model: the same values and gradients, and nothing of vocabulary size is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_actcompress import CompressionConfig, ops, patch_model
from hf_actcompress.memory.measurement.allocator import allocator_trace
from hf_actcompress.records import live_entries
from hf_actcompress.reference import logits_chunks
from tests.models.loss_head_models import batch, error, gemma2, gpt2, llama, pair
from tests.models.rl_losses import LOSSES, Loss, total
from tests.oracle import EXACT, assert_within_law

# a vocabulary of a usual size
LARGE = 32_003


@pytest.fixture
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks of the loss head, so that tiny shapes take several."""
    for bound in ("MIN_CHUNK", "MIN_DEVICE_CHUNK"):
        monkeypatch.setattr(logits_chunks, bound, 1)
    monkeypatch.setattr(logits_chunks, "MAX_CHUNK", 1 << 12)


def run(model: nn.Module, ids: Tensor, loss: Loss) -> tuple[list[Tensor], dict[str, Tensor]]:
    model.zero_grad()
    values = loss(model(input_ids=ids).logits, ids)
    total(values).backward()
    return [value.detach() for value in values], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def compare(make: Callable[[], nn.Module], loss: Loss, dtype: torch.dtype, logits: bool) -> None:
    stock, ours = pair(make, dtype, logits=logits)
    ids = batch()["input_ids"]
    expected, stock_grads = run(stock, ids, loss)
    truth, true_grads = run(copy.deepcopy(stock).double(), ids, loss)
    found, grads = run(ours, ids, loss)
    if logits:
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    else:
        assert_within_law(found, expected, truth)
    assert grads.keys() == stock_grads.keys()
    assert error(grads, true_grads) <= EXACT * error(stock_grads, true_grads)
    assert live_entries() == 0


@pytest.mark.parametrize("logits", (True, False), ids=("logits", "no logits"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients(name: str, dtype: torch.dtype, logits: bool) -> None:
    compare(llama, LOSSES[name], dtype, logits)


@pytest.mark.usefixtures("many_chunks")
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_in_many_chunks(name: str, dtype: torch.dtype) -> None:
    compare(llama, LOSSES[name], dtype, False)


@pytest.mark.parametrize("name", ("grpo with entropy", "dpo", "label smoother"))
@pytest.mark.parametrize(
    "make", (gpt2, gemma2, lambda: llama(tie_word_embeddings=True)), ids=("gpt2", "softcap", "tied")
)
def test_other_heads(make: Callable[[], nn.Module], name: str) -> None:
    compare(make, LOSSES[name], torch.float32, True)


@pytest.mark.parametrize("logits", (True, False), ids=("logits", "no logits"))
@pytest.mark.parametrize("name", ("grpo with entropy", "ppo", "label smoother"))
def test_the_model_under_autocast_and_its_output_in_fp32(name: str, logits: bool) -> None:
    """accelerate does this: autocast covers the model alone, and the output is cast to fp32."""
    stock, ours = pair(llama, logits=logits)
    ids = batch()["input_ids"]

    def step(model: nn.Module, mixed: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            output = model(input_ids=ids).logits
        values = LOSSES[name](output.float() if mixed else output, ids)
        total(values).backward()
        return [v.detach() for v in values], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    (expected, stock_grads), (found, grads) = step(stock, True), step(ours, True)
    truth, true_grads = step(copy.deepcopy(stock).double(), False)
    if logits:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert_within_law(found, expected, truth)
    assert error(grads, true_grads) <= EXACT * error(stock_grads, true_grads)


def kept(model: nn.Module, ids: Tensor, loss: Loss) -> int:
    """Bytes that the forward has allocated and that still live with the loss. The logits themselves are dropped."""
    total(loss(model(input_ids=ids).logits, ids)).backward()
    return allocator_trace(lambda: total(loss(model(input_ids=ids).logits, ids))).net_bytes


@pytest.mark.daily(3)
@pytest.mark.parametrize(("dtype", "logits"), ((torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)))
@pytest.mark.parametrize("name", LOSSES)
def test_kept_bytes_do_not_grow_with_the_vocabulary(name: str, dtype: torch.dtype, logits: bool) -> None:
    ids = batch()["input_ids"]
    config = CompressionConfig(logits=logits)
    small, large = (kept(patch_model(llama(v).to(dtype).train(), config), ids, LOSSES[name]) for v in (1_009, LARGE))
    assert small == large
    # stock keeps at least the log-probabilities of the tokens that count
    assert kept(llama(LARGE).to(dtype).train(), ids, LOSSES[name]) - large > ids.size(0) * 19 * LARGE * dtype.itemsize


@pytest.mark.parametrize("name", ("grpo with entropy", "dpo"))
def test_without_logits_no_tensor_is_of_vocabulary_size(name: str) -> None:
    ids = batch(rows=16, length=129)["input_ids"]
    model = patch_model(llama(LARGE).train(), CompressionConfig(logits=False))
    for p in model.lm_head.parameters():
        p.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    run(model, ids, LOSSES[name])
    peak = allocator_trace(lambda: run(model, ids, LOSSES[name])).peak_bytes
    assert peak < ids.numel() * LARGE * 4 / 2


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("entropy", (False, True))
def test_the_functions_of_trl(entropy: bool, dtype: torch.dtype) -> None:
    utils = pytest.importorskip("trl.trainer.utils")

    def loss(logits: Tensor, ids: Tensor) -> list[Tensor]:
        scaled = logits[:, :-1][:, -20:]
        log_probs, entropies = utils.selective_log_softmax_and_entropy(scaled, ids[:, -20:], entropy, 0.7)
        return [log_probs, utils.selective_log_softmax(logits, ids), *([entropies] if entropy else [])]

    compare(llama, loss, dtype, True)
    compare(llama, loss, dtype, False)
    ids = batch()["input_ids"]
    small, large = (kept(patch_model(llama(v).to(dtype).train()), ids, loss) for v in (1_009, LARGE))
    assert small == large


def test_logits_to_keep_and_labels() -> None:
    stock, ours = pair(llama)
    ids = batch()["input_ids"]
    expected, found = (model(input_ids=ids, logits_to_keep=5).logits for model in (stock, ours))
    assert isinstance(found, ops.DeferredLogits) and torch.equal(found, expected)
    labelled = ours(input_ids=ids, labels=ids)
    assert isinstance(labelled.logits, ops.DeferredLogits)


def test_a_loss_of_ones_own_beside_labels_without_logits() -> None:
    """`ActCompressCallback("int8")` implies logits=False, and some losses read the logits although they gave labels."""
    stock, ours = pair(llama, logits=False)
    ids = batch()["input_ids"]
    grads = []
    for model in (stock, ours, copy.deepcopy(stock).double()):
        output = model(input_ids=ids, labels=ids)
        loss = output["loss"] + total(LOSSES["own cross entropy"](output["logits"], ids))
        model.zero_grad()
        loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert error(grads[1], grads[2]) <= EXACT * error(grads[0], grads[2])


def test_frozen_parts_and_lora_like_training() -> None:
    for frozen in ("lm_head", "model."):
        stock, ours = pair(llama)
        ids = batch()["input_ids"]
        for model in (stock, ours):
            for name, p in model.named_parameters():
                p.requires_grad_(not name.startswith(frozen))
        (expected, wanted), (found, grads) = (run(m, ids, LOSSES["grpo"]) for m in (stock, ours))
        assert torch.equal(expected[0], found[0]) and grads.keys() == wanted.keys()
        _, truth = run(copy.deepcopy(stock).double(), ids, LOSSES["grpo"])
        assert error(grads, truth) <= EXACT * error(wanted, truth)


@pytest.mark.parametrize("preset", ("int8", "offload"))
def test_lossy_presets_have_exact_head_gradients(preset: str) -> None:
    stock = llama().train()
    ours = patch_model(copy.deepcopy(stock), preset)
    ids = batch()["input_ids"]
    (_, wanted), (found, grads) = (run(m, ids, LOSSES["grpo"]) for m in (stock, ours))
    _, truth = run(copy.deepcopy(stock).double(), ids, LOSSES["grpo"])
    heads = [{"h": g["lm_head.weight"]} for g in (grads, wanted, truth)]
    assert error(heads[0], heads[2]) <= EXACT * error(heads[1], heads[2])


def test_gradient_checkpointing_and_accumulation() -> None:
    stock, ours = pair(llama)
    ids = batch()["input_ids"]
    for model in (stock, ours):
        model.gradient_checkpointing_enable()
        for part in ids.split(2):
            total(LOSSES["grpo with entropy"](model(input_ids=part).logits, part)).backward()
    for (name, a), b in zip(ours.named_parameters(), stock.parameters(), strict=True):
        # both are fp32 sums of the same terms in different orders
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_padding_rows_that_are_dropped_get_their_logits() -> None:
    stock, ours = pair(llama, drop_padding=True)
    ids = batch()["input_ids"]
    mask = torch.ones_like(ids)
    mask[::2, -7:] = 0

    def step(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        logits = model(input_ids=ids, attention_mask=mask).logits
        log_probs = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        (log_probs * mask[:, 1:] * mask[:, :-1]).sum().backward()
        return log_probs.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    (expected, wanted), (found, grads) = step(stock), step(ours)
    _, truth = step(copy.deepcopy(stock).double())
    assert torch.equal(found, expected)
    for model in (stock, ours):
        model.zero_grad()
    assert error(grads, truth) <= EXACT * error(wanted, truth)


@pytest.mark.parametrize("smoothing", (0.0, 0.1))
def test_cross_entropy_inside_of_autocast(smoothing: float) -> None:
    """Autocast runs it in fp32, even if log_softmax stays in bf16. Encoder-decoder models call it under autocast."""
    stock, ours = pair(llama)
    ids = batch()["input_ids"]
    losses = []
    for model in (stock, ours):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids).logits
            losses.append(F.cross_entropy(logits.view(-1, logits.size(-1)), ids.view(-1), label_smoothing=smoothing))
    assert losses[0].dtype == losses[1].dtype == torch.float32
    assert torch.equal(*losses) if smoothing == 0.0 else torch.allclose(*losses, rtol=1e-6)
