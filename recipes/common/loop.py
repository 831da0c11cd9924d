"""The training loop. Each recipe defines what one optimizer step does."""

import argparse
import time
from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from .data import Example
from .state import learning_rate, save_checkpoint, set_learning_rate

TrainStep = Callable[[Accelerator, torch.nn.Module, torch.optim.Optimizer, list[Example], float], float]


def run_steps(
    args: argparse.Namespace,
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Example],
    losses: list[float],
    train_step: TrainStep,
) -> list[float]:
    """Train to --max-steps. Goes on from the losses it is given and appends to them; returns tokens/s step by step."""
    model.train()
    batches, speeds = iter(loader), []
    progress = tqdm(range(len(losses), args.max_steps), disable=not accelerator.is_main_process)
    for step in progress:
        began = time.perf_counter()
        set_learning_rate(optimizer, learning_rate(args, step))
        micro_batches = [next(batches) for _ in range(args.gradient_accumulation_steps)]
        losses.append(train_step(accelerator, model, optimizer, micro_batches, args.max_grad_norm))
        tokens = sum(batch["input_ids"].numel() for batch in micro_batches) * accelerator.num_processes
        speeds.append(tokens / (time.perf_counter() - began))
        progress.set_postfix(loss=f"{losses[-1]:.4f}")
        if args.save_every and len(losses) % args.save_every == 0:
            save_checkpoint(accelerator, args, losses)
    return speeds
