"""transformers.Trainer and an Accelerate loop, a few steps on a CPU: the losses are those of the stock run."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.modules.base import PatchedModule
from tests.families import BODY, BY_NAME, Family
from tests.layers.plans import NAMES as PLANS
from tests.layers.plans import calls

three = pytest.mark.parametrize(
    "family", [BY_NAME[n] for n in ("bert", "gpt2-gelu-tanh", "llama")], ids=lambda f: f.name
)
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.daily(2)]


class _Rows(Dataset[dict[str, torch.Tensor]]):
    """24 rows with a column that the model does not take, which Trainer drops by the forward's signature."""

    def __init__(self, family: Family) -> None:
        batches = [family.make_batch("right", seed) for seed in range(8)]
        self.rows = [{k: v[i] for k, v in batch.items()} for batch in batches for i in range(3)]
        self.column_names = [*self.rows[0], "idx"]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.rows[index], "idx": torch.tensor(index)}


def _trainer(model: Any, family: Family, folder: Path, **options: Any) -> Trainer:
    """A Trainer. Its constructor seeds the generators, so build one, train it, and only then build the next."""
    arguments = {
        "output_dir": str(folder), "per_device_train_batch_size": 3, "per_device_eval_batch_size": 6, "max_steps": 4,
        "logging_steps": 1, "report_to": "none", "bf16": True, "use_cpu": True, "disable_tqdm": True, "seed": 3,
        "learning_rate": 1e-3, "save_strategy": "no", "gradient_accumulation_steps": 2, "dataloader_pin_memory": False,
    }  # fmt: skip
    rows = _Rows(family)
    return Trainer(
        model=model, args=TrainingArguments(**{**arguments, **options}), train_dataset=rows, eval_dataset=rows
    )


def _trained(trainer: Trainer) -> Trainer:
    trainer.train()
    return trainer


def _losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _assert_same_run(ours: Trainer, stock: Trainer, family: Family, steps: int = 4) -> None:
    assert len(_losses(stock)) == steps
    if "autocast" in family.bit_equal:
        assert _losses(ours) == _losses(stock)
        for a, b in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
            assert torch.equal(a, b)
    else:
        # sums in another order change the gradients by 1e-7, and may change the sign of a gradient near zero, on which
        # Adam's first steps depend
        assert _losses(ours) == pytest.approx(_losses(stock), rel=1e-4)


@three
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_and_evaluation(family: Family, checkpointing: bool, tmp_path: Path) -> None:
    stock, ours = (
        _trained(_trainer(model, family, tmp_path, gradient_checkpointing=checkpointing))
        for model in (family.build(dropout=0.1), patch_model(family.build(dropout=0.1), BODY))
    )
    _assert_same_run(ours, stock, family)
    assert any(isinstance(m, PatchedModule) for m in ours.model.modules())
    predictions = [trainer.predict(trainer.eval_dataset) for trainer in (ours, stock)]
    assert predictions[0].predictions.shape == predictions[1].predictions.shape == (24, 13, 67)
    if "autocast" in family.bit_equal:
        assert (predictions[0].predictions == predictions[1].predictions).all()
        assert ours.evaluate()["eval_loss"] == stock.evaluate()["eval_loss"]


@pytest.mark.parametrize("how", ["fp32", "autocast", "checkpointed", "lora"])
@pytest.mark.parametrize("name", PLANS)
def test_every_layer_runs_by_plans(name: str, how: str, tmp_path: Path) -> None:
    """They do so in each micro-step, with all arguments that the Trainer passes on."""
    family = BY_NAME[name]
    model = family.build(dropout=0.1)
    if how == "lora":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=2))
    options = {"bf16": how == "autocast", "gradient_checkpointing": how == "checkpointed", "max_steps": 1}
    model = _trained(_trainer(patch_model(model), family, tmp_path, **options)).model
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    assert calls(model) == [2] * len(layers)


@three
@pytest.mark.parametrize(
    "config", [BODY, CompressionConfig(), CompressionConfig(logits=False)], ids=["body", "exact", "no_logits"]
)
def test_label_smoothing(family: Family, config: CompressionConfig, tmp_path: Path) -> None:
    """The Trainer does not pass the labels on and computes the loss from the logits, which no option may remove."""
    stock, ours = (
        _trainer(model, family, tmp_path, label_smoothing_factor=0.1)
        for model in (family.build(), patch_model(family.build(), config))
    )
    for trainer in (stock, ours):
        trainer.train()
    _assert_same_run(ours, stock, family)


@three
def test_the_whole_preset(family: Family, tmp_path: Path) -> None:
    """The loss head computes the loss in fp32. In masked models under autocast, stock's is in bf16."""
    stock, ours = (
        _trainer(model, family, tmp_path, learning_rate=1e-4) for model in (family.build(), patch_model(family.build()))
    )
    for trainer in (stock, ours):
        trainer.train()
    # a loss of about 4 is rounded in bf16 by up to 2 ** -6
    assert _losses(ours) == pytest.approx(_losses(stock), abs=2**-6)
    assert ours.predict(ours.eval_dataset).predictions.shape == (24, 13, 67)


@three
def test_save_and_resume(family: Family, tmp_path: Path) -> None:
    """Two steps, and then two more from the checkpoint, in a patched model and in a stock one."""
    whole = _trainer(patch_model(family.build(dropout=0.1), BODY), family, tmp_path / "whole")
    whole.train()
    first = _trainer(
        patch_model(family.build(dropout=0.1), BODY), family, tmp_path / "run", save_strategy="steps", save_steps=2
    )
    first.train()
    for model in (patch_model(family.build(seed=5, dropout=0.1), BODY), family.build(seed=5, dropout=0.1)):
        resumed = _trainer(model, family, tmp_path / "run")
        resumed.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
        _assert_same_run(resumed, whole, family)


@three
def test_accelerate_loop(family: Family) -> None:
    curves = []
    for model in (family.build(dropout=0.1), patch_model(family.build(dropout=0.1), BODY)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
        torch.manual_seed(0)
        losses = []
        for seed in range(4):
            loss = model(**family.make_batch("right", seed)).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        unwrapped = accelerator.unwrap_model(model)
        assert unwrapped.state_dict().keys() == family.build().state_dict().keys()
        curves.append(losses)
    if "autocast" in family.bit_equal:
        assert curves[0] == curves[1]
    else:
        assert curves[0] == pytest.approx(curves[1], rel=1e-4)


def test_unwrapped_without_the_fp32_wrapper() -> None:
    """accelerate takes the forward that it finds and binds it to the model again, as if it were a plain function."""
    family = BY_NAME["llama"]
    accelerator, batch = Accelerator(cpu=True, mixed_precision="bf16"), family.make_batch("right")
    losses = []
    for model in (family.build(), patch_model(family.build(), BODY)):
        unwrapped = accelerator.unwrap_model(accelerator.prepare(model), keep_fp32_wrapper=False)
        losses.append(unwrapped(**batch).loss)
    assert torch.equal(*losses)
