"""The logits that a training step returns by default: computed when something reads them, and then stock's."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.nn import functional as F

from hf_actcompress import CompressionConfig, ops, patch_model
from hf_actcompress.memory.measurement.allocator import allocator_trace
from tests.models.loss_head_models import V, batch, bert, error, gemma2, gpt2, llama, pair, step
from tests.oracle import EXACT

MODELS = {"llama": llama, "gpt2": gpt2, "bert": bert, "gemma2": gemma2}


def _gathered(x: Tensor) -> Tensor:
    accelerate = pytest.importorskip("accelerate")
    found: Tensor = accelerate.Accelerator(cpu=True).gather_for_metrics(x)
    return found


def _reloaded(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save({"logits": x}, file)
    file.seek(0)
    found: Tensor = torch.load(file)["logits"]
    return found


def _selective_log_softmax(x: Tensor) -> Tensor:
    utils = pytest.importorskip("trl.trainer.utils")
    found: Tensor = utils.selective_log_softmax(x[:, :-1] / 0.9, torch.arange(4 * 32).view(4, 32))
    return found


# what code around a model does with `outputs.logits`
READERS: dict[str, Callable[[Tensor], Any]] = {
    "metadata": lambda x: torch.tensor([isinstance(x, Tensor), *x.shape, x.dim(), x.numel(), x.is_floating_point()]),
    "index": lambda x: x[1, 2:5, 7],
    "mask": lambda x: x[torch.arange(4) % 2 == 0],
    "last token": lambda x: x[:, -1, :].float(),
    "loop": lambda x: torch.stack([row[-1] for row in x]),
    "argmax": lambda x: x.argmax(-1),
    "max": lambda x: x.max(dim=-1).values,
    "topk": lambda x: x.topk(5).values,
    "softmax": lambda x: torch.softmax(x.float(), dim=-1),
    "arithmetic": lambda x: x * 2 + 1,
    "joined": lambda x: torch.cat([x, x.new_zeros(4, 1, V)], 1),
    "item": lambda x: torch.tensor(x[0, 0, 0].item()),
    "list": lambda x: torch.tensor(x[0].tolist()),
    "numpy": lambda x: torch.from_numpy(x.detach().float().cpu().numpy()),
    "numpy of an array": lambda x: torch.from_numpy(np.asarray(x.detach().float())),
    "gather": _gathered,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "file": _reloaded,
    "copy": lambda x: copy.deepcopy(x.detach()),
    "TRL": _selective_log_softmax,
    "accuracy": lambda x: (x[:, :-1].argmax(-1) == torch.arange(32)).float().mean(),
    "perplexity": lambda x: F.cross_entropy(x[:, :-1].flatten(0, 1).float(), torch.arange(4 * 32)).exp(),
}


@pytest.mark.parametrize("when", ("before", "after"))
@pytest.mark.parametrize("name", READERS)
def test_whoever_reads_them_finds_stocks(name: str, when: str) -> None:
    """Before backward, and after it."""
    stock, ours = pair(llama)
    inputs, read = batch(), READERS[name]
    found = []
    for model in (stock, ours):
        output = model(**inputs)
        before = read(output.logits) if when == "before" else None
        output.loss.backward()
        found.append(before if when == "before" else read(output.logits))
        assert output.logits.requires_grad and output.logits.grad_fn is not None
    expected, value = (ops.plain(x).detach() for x in found)
    assert value.dtype == expected.dtype and value.shape == expected.shape
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", ("fp32", "bf16", "autocast"))
@pytest.mark.parametrize("name", MODELS)
def test_they_have_stocks_bits_after_backward(name: str, mode: str) -> None:
    stock, ours = pair(MODELS[name], torch.bfloat16 if mode == "bf16" else torch.float32)
    inputs = batch()
    (expected, _), (found, _) = (step(model, inputs, mode == "autocast") for model in (stock, ours))
    assert not found.logits.chain.made
    assert torch.equal(found.logits, expected.logits) and torch.equal(found.logits, expected.logits)
    assert list(found) == list(expected) and len(found.to_tuple()) == len(expected.to_tuple())


def test_a_step_that_reads_none_computes_none() -> None:
    """The step's peak grows with the vocabulary by the head's weight and its gradients, and by no logits."""
    peaks = []
    for v in (2_000, 18_000):
        model = patch_model(llama(v).train())
        inputs = batch(2_000, rows=8, length=128)
        model(**inputs).loss.backward()

        def run(model: Any = model, inputs: Any = inputs) -> Tensor:
            output = model(**inputs)
            output.loss.backward()
            return output.logits  # type: ignore[no-any-return]

        peaks.append(allocator_trace(run).peak_bytes)
    logits = 16_000 * 8 * 128 * 4
    assert peaks[1] - peaks[0] < logits / 4


@pytest.mark.parametrize("make", (llama, gemma2), ids=("llama", "softcap"))
def test_a_second_loss_of_them(make: Callable[[], Any]) -> None:
    """A z-loss, an entropy, and a distillation beside the model's own loss."""
    stock, ours = pair(make)
    inputs, teacher = batch(), torch.randn(4, 33, V).softmax(-1)

    def run(model: Any) -> dict[str, Tensor]:
        model.zero_grad()
        output = model(**inputs)
        x = output.logits
        log_p = x.log_softmax(-1)
        extra = 1e-2 * x.logsumexp(-1).square().mean() - 1e-2 * (log_p.exp() * log_p).sum(-1).mean()
        (output.loss + extra + F.kl_div(log_p, teacher.to(x.dtype), reduction="batchmean")).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    truth = run(copy.deepcopy(stock).double())
    assert error(run(ours), truth) <= EXACT * error(run(stock), truth)


def test_whole_logits_are_an_option() -> None:
    stock, ours = pair(llama, logits=True)
    (expected, _), (found, _) = step(stock, batch()), step(ours, batch())
    assert type(found.logits) is Tensor and found.logits.shape == expected.logits.shape


def _in_place(model: Any, output: Any) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def _through_data(model: Any, output: Any) -> None:
    model.lm_head.weight.data.mul_(0.9)


@pytest.mark.parametrize("change", (_in_place, _through_data))
def test_an_error_names_the_cure_if_the_weights_have_changed(change: Callable[[Any, Any], None]) -> None:
    """Logits that were read before stay what they were."""
    _, ours = pair(llama)
    read, unread = ours(**batch()), ours(**batch())
    (read.loss + unread.loss).backward()
    before = read.logits + 0
    change(ours, read)
    assert torch.equal(read.logits, before)
    with pytest.raises(RuntimeError, match=r"logits.*weight.*written on.*CompressionConfig\(logits=True\)"):
        unread.logits.argmax(-1) + unread.logits.sum()


def test_a_frozen_head_may_train_its_body_on() -> None:
    """An optimizer's step that leaves the head alone leaves the logits readable."""
    stock, ours = pair(llama)
    for model in (stock, ours):
        model.lm_head.requires_grad_(False)
    inputs, read = batch(), []
    for model in (stock, ours):
        output = model(**inputs)
        output.loss.backward()
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
        read.append(output.logits + 0)
    assert torch.equal(*read)


class _Selected(hf.LlamaForCausalLM):
    """Returns the logits of some rows."""

    def forward(self, **inputs: Any) -> Any:
        output = super().forward(**inputs)
        output.logits = output.logits[:, 1::2]
        return output


def test_some_rows_of_them_are_returned_as_well() -> None:
    stock = _Selected(llama().config).train()
    ours, inputs = patch_model(copy.deepcopy(stock)), batch()
    (expected, _), (found, _) = step(stock, inputs), step(ours, inputs)
    assert torch.equal(found.logits, expected.logits)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", (CompressionConfig(), CompressionConfig(logits=True)), ids=("lazy", "whole"))
def test_a_trainer_that_reads_them_while_it_trains_and_evaluates(config: CompressionConfig, tmp_path: Path) -> None:
    """A `compute_loss` of its own that logs an accuracy, and metrics of whole predictions."""
    data = [{name: x[row] for name, x in batch().items()} for row in range(4)]
    seen: list[float] = []

    class Logging(hf.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            hits = outputs.logits[:, :-1].argmax(-1) == inputs["labels"][:, 1:]
            seen.append(hits.float().mean().item())
            return (loss, outputs) if return_outputs else loss

    def metrics(found: Any) -> dict[str, float]:
        return {"mean": float(found.predictions.mean()), "best": float(found.predictions.argmax(-1).sum())}

    results: list[dict[str, float]] = []
    for patched in (False, True):
        torch.manual_seed(0)
        model = llama(use_cache=False)
        if patched:
            patch_model(model, config)
        arguments = hf.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=2, per_device_eval_batch_size=3, max_steps=3, report_to=[],
            use_cpu=True, save_strategy="no", learning_rate=1e-3,
        )  # fmt: skip
        trainer = Logging(model, arguments, train_dataset=data, eval_dataset=data, compute_metrics=metrics)
        trainer.train()
        results.append(trainer.evaluate())
    half = len(seen) // 2
    assert half > 3 and seen[:half] == pytest.approx(seen[half:])
    for name in ("eval_loss", "eval_mean", "eval_best"):
        assert results[0][name] == pytest.approx(results[1][name], rel=1e-4, abs=1e-6)
