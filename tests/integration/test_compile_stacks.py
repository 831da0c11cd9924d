"""torch.compile where users meet it: Trainer, plans, packed batches, sharded layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_actcompress import kept_bytes, patch_model, plan
from hf_actcompress.compilation._backend import _as_it_is
from hf_actcompress.private_apis import compile_for_inductor
from tests.families import BY_NAME, differing, step
from tests.integration.compiling import kept_by

pytestmark = pytest.mark.daily(6)

BACKEND = "hf_actcompress"
LLAMA = BY_NAME["llama"]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def _train(model: Any, folder: Path, **options: Any) -> list[float]:
    return _losses(_trained(model, folder, **options))


def _losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _trained(model: Any, folder: Path, **options: Any) -> Trainer:
    batch = LLAMA.make_batch()
    rows = [{name: x[i] for name, x in batch.items()} for i in range(len(batch["labels"]))] * 2
    args = TrainingArguments(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=3, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, seed=0, **options,
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=rows)  # type: ignore[arg-type]
    trainer.train()
    return trainer


@pytest.mark.parametrize("how", ["torch_compile=True", "model.compile"])
def test_trainer(how: str, tmp_path: Path) -> None:
    """One graph, eager mode's losses. Accelerate knows torch's backends alone: ours is chosen on the model."""
    preset = "exact" if how == "model.compile" else "int8"
    eager, compiled = (patch_model(LLAMA.build(torch.bfloat16), preset) for _ in range(2))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if how == "model.compile":
        compiled.compile(backend=BACKEND)
    losses = _train(compiled, tmp_path, torch_compile=how != "model.compile")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs + 1
    assert losses == pytest.approx(_train(eager, tmp_path), rel=1e-4 if how == "model.compile" else 1e-2)


@pytest.mark.parametrize("stack", ["plain", "checkpointing", "lora"])
def test_a_backend_that_the_trainer_is_told(stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With checkpointed layers and adapters, too: eager stock's losses, and less kept than by stock's graph.

    Inductor divides the graphs, and no code is generated for them.
    """
    whole: Any = compile_for_inductor(lambda graph, inputs, **options: _as_it_is(graph, inputs))
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, inputs, **options: whole(graph, inputs))
    options: dict[str, Any] = {}
    if stack == "checkpointing":
        options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    losses, kept, batch = [], [], LLAMA.make_batch()
    for ours, backend in ((False, None), (False, "inductor"), (True, "inductor")):
        torch._dynamo.reset()
        model = LLAMA.build(torch.float32)
        if stack == "lora":
            peft = pytest.importorskip("peft")
            model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
        if ours:
            patch_model(model)
        trainer = _trained(model, tmp_path, torch_compile=backend is not None, torch_compile_backend=backend, **options)
        losses.append(_losses(trainer))
        kept.append(kept_by(trainer.model_wrapped, batch))
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)
    assert kept[2] < 0.9 * kept[1]


def test_a_plan_for_a_compiled_model() -> None:
    model = LLAMA.build(torch.bfloat16)
    compiled: Any = torch.compile(model, backend=BACKEND)
    sizes = {"batch_size": 3, "seq_len": 13}
    found = plan(compiled, **sizes, budget="1GiB", device="cpu")
    patch_model(compiled, found)
    batch = LLAMA.make_batch()
    compiled(**batch).loss.backward()
    assert kept_bytes(lambda: compiled(**batch), "cpu") <= 1.02 * kept_bytes(lambda: model(**batch), "cpu") + 2048


def test_a_packed_batch() -> None:
    """Positions that start again: the sequences of a row do not see each other, compiled as in eager mode."""
    stock, ours = (LLAMA.build(torch.bfloat16) for _ in range(2))
    patch_model(ours)
    batch = LLAMA.make_batch()
    length = batch["input_ids"].shape[1]
    positions = torch.tensor([*range(5), *range(length - 5)]).expand_as(batch["input_ids"])
    packed = {**batch, "position_ids": positions, "attention_mask": None}
    compiled = [torch.compile(m, backend=b, fullgraph=True) for m, b in ((ours, BACKEND), (stock, "aot_eager"))]
    (loss, grads), (expected_loss, expected) = (step(model, packed) for model in compiled)
    assert torch.equal(loss, expected_loss) and not differing(grads, expected)
    assert not torch.equal(loss, step(ours, {**batch, "attention_mask": None})[0])
