"""The process that tests/fuzz/test_resume.py kills: a Trainer run with checkpoints. Arguments: family, folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_actcompress import patch_model
from tests.families import BODY, BY_NAME, Family

STEPS, SAVE_STEPS = 9, 2
# the step in which the process is killed: checkpoints of steps 2 and 4 are there
KILLED_IN = 5


class Rows(Dataset[dict[str, torch.Tensor]]):
    """18 rows, so that the run takes one epoch and a half."""

    def __init__(self, family: Family) -> None:
        batches = [family.make_batch("right", seed) for seed in range(6)]
        self.rows = [{name: x[i] for name, x in batch.items()} for batch in batches for i in range(3)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


class Announce(TrainerCallback):
    """Prints the step that begins, so that another process knows when to kill this one."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        print(f"step {state.global_step + 1}", flush=True)


def make_model(family: Family, *, ours: bool, seed: int = 0) -> Any:
    """A model with dropout, so that a resumed run must also restore the state of the generators."""
    model = family.build(dropout=0.1, seed=seed)
    return patch_model(model, BODY) if ours else model


def make_trainer(model: Any, family: Family, folder: Path, *callbacks: TrainerCallback) -> Trainer:
    """The Trainer of every run of the test."""
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=3, max_steps=STEPS, save_steps=SAVE_STEPS, logging_steps=1,
        report_to="none", use_cpu=True, disable_tqdm=True, seed=3, learning_rate=1e-3, dataloader_pin_memory=False,
    )  # fmt: skip
    return Trainer(model=model, args=arguments, train_dataset=Rows(family), callbacks=list(callbacks))


def main() -> None:
    """Train until somebody kills this process, or to the end."""
    torch.set_num_threads(1)
    family = BY_NAME[sys.argv[1]]
    make_trainer(make_model(family, ours=True), family, Path(sys.argv[2]), Announce()).train()


if __name__ == "__main__":
    main()
