"""Evaluation under no_grad: MLPs run in tiles, loss and logits are stock's, and unread logits are not computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from hf_actcompress import CompressionConfig, ops, patch_model
from hf_actcompress.memory.measurement.allocator import allocator_trace
from tests.families import BY_NAME, build, mode_of, relative_error, step
from tests.models.loss_head_models import bert, gemma2, llama

HIDDEN, WIDTH, ROWS, TILE = 64, 2048, 512, 64


def _llama() -> Any:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


@pytest.mark.parametrize("training", [False, True])
def test_mlps_in_tiles_have_the_memory_of_one(training: bool) -> None:
    """Stock holds three tensors of the MLP's width at once, for all rows."""
    model = _llama().train(training)
    ids = torch.randint(0, 64, (1, ROWS), generator=torch.Generator().manual_seed(0))

    def evaluate() -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(input_ids=ids).logits
            return logits

    stock, expected = allocator_trace(evaluate).peak_bytes, evaluate()
    patch_model(model, CompressionConfig(tiled_mlp=TILE))
    ours = allocator_trace(evaluate).peak_bytes
    torch.testing.assert_close(evaluate(), expected, rtol=1e-4, atol=1e-5)
    assert stock >= 3 * ROWS * WIDTH * 4
    assert ours <= 3 * TILE * WIDTH * 4 + 10 * ROWS * HIDDEN * 4
    short = ids[:, :TILE]
    with torch.no_grad():
        whole = model(input_ids=short).logits
        assert torch.equal(whole, _llama()(input_ids=short).logits), "one tile is the MLP itself"


def test_reentrant_checkpointing_draws_in_tiles_both_times() -> None:
    """Its first forward runs without gradients. LoRA's dropout must draw the same values there and in backward."""
    peft = pytest.importorskip("peft")
    grads = []
    for reentrant in (False, True):
        model = build(BY_NAME["llama"], "fp32")
        torch.manual_seed(1)
        lora = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False, lora_dropout=0.5)
        model = patch_model(peft.get_peft_model(model, lora), CompressionConfig(tiled_mlp=5))
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        grads.append(step(model, BY_NAME["llama"].make_batch())[1])
    assert relative_error(grads[1], grads[0]) < 1e-5


VOCABULARY = 16384
HEADS = {"llama": llama, "bert": bert, "gemma2": gemma2}


def _batch(length: int = 64, rows: int = 8) -> dict[str, Tensor]:
    ids = torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.masked_fill(ids < 9, -100)}


@torch.no_grad()
def _evaluated(model: Any, batch: dict[str, Tensor], mode: str) -> Any:
    with mode_of(mode):
        return model.eval()(**batch)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("mode", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("logits", [True, False])
def test_loss_and_logits_are_stocks(name: str, mode: str, logits: bool) -> None:
    torch.manual_seed(0)
    model = HEADS[name]().to(torch.bfloat16 if mode == "bf16" else torch.float32)
    batch = _batch()
    expected = _evaluated(model, batch, mode)
    patch_model(model, CompressionConfig(logits=logits, plans=False))
    found = _evaluated(model, batch, mode)
    assert isinstance(found.logits, ops.DeferredLogits) != logits
    if logits:
        assert torch.equal(found.loss, expected.loss)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)
    best = found.logits.detach()[:, :-1].contiguous().argmax(-1)
    # a product in chunks may round differently, so another token with an almost equal logit may be the best
    picked = expected.logits[:, :-1].gather(-1, best[..., None])[..., 0].float()
    torch.testing.assert_close(picked, expected.logits[:, :-1].amax(-1).float(), rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(found.logits + 0, expected.logits, rtol=1e-2, atol=1e-3)
    assert found.logits.shape == expected.logits.shape and found.logits.dtype == expected.logits.dtype


def test_what_an_evaluation_needs() -> None:
    """Bytes per logit. Stock holds the logits in bf16, and logits and log-probabilities in fp32, which makes 10."""
    model, batch = llama(VOCABULARY).bfloat16(), _batch()
    size = batch["labels"].numel() * VOCABULARY

    def peak(reads_best: bool = False) -> float:
        def evaluate() -> Any:
            output = _evaluated(model, batch, "bf16")
            return output, output.logits.argmax(-1) if reads_best else None

        return allocator_trace(evaluate).peak_bytes / size

    stock = peak()
    patch_model(model)
    kept = peak()
    patch_model(model, CompressionConfig(logits=False))
    loss_alone, argmax = peak(), peak(reads_best=True)
    assert stock > 9.9 and kept < 3 and loss_alone < 1 and argmax < 1


def test_logits_are_not_computed_with_other_weights() -> None:
    model, batch = patch_model(llama(), CompressionConfig(logits=False)), _batch()
    output = _evaluated(model, batch, "fp32")
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"CompressionConfig\(logits=True\)"):
        output.logits.argmax(-1)


def test_without_labels_and_in_inference_mode_logits_are_plain() -> None:
    model, batch = patch_model(llama(), CompressionConfig(logits=False)).eval(), _batch()
    with torch.no_grad():
        assert type(model(input_ids=batch["input_ids"]).logits) is Tensor
    with torch.inference_mode():
        assert type(model(**batch).logits) is Tensor


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reads_best", [True, False])
def test_a_trainer_evaluates(reads_best: bool, tmp_path: Path) -> None:
    """The metric reads the argmax of each token, or all logits of three batches."""
    data = [{name: x[row] for name, x in _batch().items()} for row in range(8)]
    seen: list[type] = []

    def best(logits: Tensor, labels: Tensor) -> Tensor:
        seen.append(type(logits))
        return logits.argmax(-1)

    def accuracy(found: Any) -> dict[str, float]:
        predictions = found.predictions if reads_best else found.predictions.argmax(-1)
        return {"sum": float(predictions.sum()), "rows": len(predictions)}

    results = []
    for config in (None, CompressionConfig(logits=False)):
        torch.manual_seed(0)
        model = llama(use_cache=False)
        if config is not None:
            patch_model(model, config)
        arguments = hf.TrainingArguments(str(tmp_path), per_device_eval_batch_size=3, report_to=[], use_cpu=True)
        trainer = hf.Trainer(
            model, arguments, eval_dataset=data, compute_metrics=accuracy,
            preprocess_logits_for_metrics=best if reads_best else None,
        )  # fmt: skip
        results.append(trainer.evaluate())
    assert not reads_best or seen == [Tensor] * 3 + [ops.DeferredLogits] * 3
    for name in ("eval_loss", "eval_sum", "eval_rows"):
        assert results[0][name] == pytest.approx(results[1][name], rel=1e-5)


@pytest.mark.parametrize("length", [4, 24])
def test_logits_that_are_read_after_other_weights_are_back(length: int) -> None:
    """Averaged weights are put in through `.data` for a forward, which no version counter sees.

    Few logits are returned as they are. Many are not kept, and an error says that they cannot be computed any more.
    """
    ids = torch.arange(2 * length).view(2, length) % 60
    read = []
    for config in (None, CompressionConfig(logits=False)):
        model = BY_NAME["llama"].build().eval()
        if config is not None:
            patch_model(model, config)
        own = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.data.mul_(0.5)
            output = model(input_ids=ids, labels=ids)
            for p, x in zip(model.parameters(), own, strict=True):
                p.data.copy_(x)
            if config is not None and 2 * length > 32:
                with pytest.raises(RuntimeError, match=r"written on through .data"):
                    output.logits + 0
                return
            read.append(output.logits + 0)
    assert torch.equal(*read)
