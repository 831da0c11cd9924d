"""The job of finetune_clm.py with transformers' Trainer; the only change is one callback.

python recipes/trainer_example.py --compare
python recipes/trainer_example.py --model gpt2 --dataset wikitext --dataset-config wikitext-2-raw-v1
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import common  # noqa: F401  it says which package is missing, so it comes first
import torch
from accelerate.utils import set_seed
from common.compare import Mode, RunResult, compare_runs, compute_dtype, measure_peak
from common.data import CausalBlocks, corpus_blocks, load_corpus
from common.models import CAUSAL_CONFIGS, add_lora, build_model, nudge
from common.options import build_parser, parse
from common.report import print_run, publish
from common.tokenization import get_tokenizer
from torch.utils.data import Subset
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hf_actcompress import ActCompressCallback


class StepRecorder(TrainerCallback):
    """Keeps the loss and the time of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


def training_arguments(args: argparse.Namespace) -> TrainingArguments:
    """The recipe's options as arguments of the Trainer."""
    return TrainingArguments(
        output_dir=str(args.output_dir),
        max_steps=args.max_steps,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        learning_rate=args.lr,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=args.warmup,
        weight_decay=args.weight_decay,
        max_grad_norm=args.max_grad_norm,
        bf16=args.mixed_precision == "bf16",
        fp16=args.mixed_precision == "fp16",
        logging_steps=1,  # the comparison is step by step
        save_strategy="steps" if args.save_every else "no",
        save_steps=args.save_every or 500,
        report_to="none",
        use_cpu=not torch.accelerator.is_available(),  # must be explicit, or bf16 is refused without a GPU
        dataloader_pin_memory=torch.accelerator.is_available(),
        seed=args.seed,
    )


def make_trainer(args: argparse.Namespace, mode: Mode, recorder: StepRecorder) -> Trainer:
    """A trainer for the model, with our callback when the run is patched."""
    corpus = load_corpus(args)
    tokenizer = get_tokenizer(args, corpus, "causal")
    train_set, eval_set = map(CausalBlocks, corpus_blocks(args, corpus, tokenizer))
    set_seed(args.seed)
    model = add_lora(args, build_model(args, AutoModelForCausalLM, tokenizer), "CAUSAL_LM")
    callbacks: list[TrainerCallback] = [recorder]
    if mode == "patched":
        callbacks.append(ActCompressCallback(args.preset, compile=args.compile_layers))
    if mode == "control":
        nudge(model, getattr(torch, compute_dtype(args)), args.seed)
    return Trainer(
        model=model,
        args=training_arguments(args),
        train_dataset=train_set,
        eval_dataset=Subset(eval_set, range(min(len(eval_set), args.eval_batches * args.batch_size))),
        processing_class=tokenizer,
        callbacks=callbacks,
    )


def train(args: argparse.Namespace, mode: Mode) -> RunResult:
    """Train from the seed, or from a checkpoint, to --max-steps."""
    recorder = StepRecorder()
    trainer = make_trainer(args, mode, recorder)
    trainer.train(resume_from_checkpoint=str(args.resume) if args.resume else None)
    loss = trainer.evaluate()["eval_loss"]
    metrics, peak = {"held-out loss": loss, "perplexity": math.exp(min(loss, 700))}, None
    if args.compare:
        batch = next(iter(trainer.get_eval_dataloader()))
        model = trainer.model_wrapped.train()
        backward = trainer.accelerator.backward
        peak = measure_peak(trainer.accelerator, lambda: backward(model(**batch, use_cache=False).loss))
    else:
        trainer.save_model()
    per_step = args.batch_size * args.seq_len * args.gradient_accumulation_steps * trainer.args.world_size
    return RunResult(mode, recorder.losses, per_step / statistics.median(recorder.seconds), metrics, peak)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe; the exit status is 1 when an exact preset does not reproduce the stock losses."""
    args = parse(build_parser(__doc__ or "", CAUSAL_CONFIGS), argv, checkpoint_file="trainer_state.json")
    if args.compare:
        return publish(compare_runs(args, lambda mode: train(args, mode)), args)
    print_run(train(args, "patched"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
