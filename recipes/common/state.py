"""The state of a run outside of its loop: accelerator, learning rate, checkpoints, sums over processes."""

import argparse
import json
import math
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from transformers import PreTrainedTokenizerBase

IGNORE = -100  # the label that losses skip


def make_accelerator(args: argparse.Namespace) -> Accelerator:
    """An accelerator that accumulates by count alone.

    By default accelerate also ends an accumulation at the last batch of a loader. The recipes fetch the micro-batches
    of a step together, so the loader is at its end while that step still accumulates.
    """
    plugin = GradientAccumulationPlugin(num_steps=args.gradient_accumulation_steps, sync_with_dataloader=False)
    return Accelerator(mixed_precision=args.mixed_precision, gradient_accumulation_plugin=plugin)


def learning_rate(args: argparse.Namespace, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth. It depends on the step alone, so nothing of it has to be saved."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    progress = (step - args.warmup) / max(1, args.max_steps - args.warmup)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Write one learning rate into every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = value


def total(accelerator: Accelerator, value: torch.Tensor) -> torch.Tensor:
    """The sum of a scalar over all processes."""
    return accelerator.reduce(value, reduction="sum")


def save_checkpoint(accelerator: Accelerator, args: argparse.Namespace, losses: list[float]) -> None:
    """Write a folder that --resume continues from: weights, optimizer, RNG states, and the losses so far."""
    folder = args.output_dir / f"checkpoint-{len(losses)}"
    accelerator.save_state(folder)
    if accelerator.is_main_process:
        progress = {"losses": losses, "seed": args.seed}
        # Last, because its presence is what marks the checkpoint as complete.
        (folder / "progress.json").write_text(json.dumps(progress))


def losses_so_far(args: argparse.Namespace) -> list[float]:
    """The losses of the steps before the checkpoint that --resume names; none for a fresh start."""
    if args.resume is None:
        return []
    progress = json.loads((args.resume / "progress.json").read_text())
    losses: list[float] = progress["losses"]
    if progress["seed"] != args.seed:
        raise SystemExit(f"--resume {args.resume} was trained with --seed {progress['seed']}, not {args.seed}")
    if len(losses) >= args.max_steps:
        raise SystemExit(f"--resume {args.resume} is at step {len(losses)}: raise --max-steps {args.max_steps}")
    return losses


def save_model(
    accelerator: Accelerator,
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    losses: list[float],
) -> None:
    """Write the trained model as stock transformers (or peft) loads it, with the losses beside it."""
    state = accelerator.get_state_dict(model)  # gathers sharded weights, so every process has to call it
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(folder, state_dict=state)
        tokenizer.save_pretrained(folder)
        (folder / "losses.json").write_text(json.dumps(losses))
