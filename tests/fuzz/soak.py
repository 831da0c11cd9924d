"""Many optimizer steps of tiny patched models, and whether anything grows: `python -m tests.fuzz.soak --steps 2000`.

Memory that a step leaves behind shows in one of four numbers: the tensors that the garbage collector knows, their
bytes, the blocks that Python has allocated, and the resident set of the process.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.records import live_entries
from tests.families import BY_NAME, Batch, mode_of
from tests.fuzz.check import prepare

# Python's own caches and the C heap change by this much over thousands of steps; one object per step would be more
PYTHON_BLOCKS = 1000
RESIDENT_BYTES = 24 * 1024 * 1024
Step = Callable[[int], None]


@dataclass(frozen=True)
class Subject:
    """What is trained: a family, a preset, and whether with LoRA."""

    name: str
    family: str
    preset: str = "exact"
    lora: bool = False
    drop_padding: bool = False


SUBJECTS = (
    Subject("llama with LoRA", "llama", lora=True),
    Subject("bert", "bert"),
    Subject("bert without padding, int8", "bert", preset="int8", drop_padding=True),
    Subject("llama, offload", "llama", preset="offload"),
)


@dataclass(frozen=True)
class Reading:
    """What is held after a step."""

    step: int
    tensors: int
    tensor_bytes: int
    python_blocks: int
    resident_bytes: int
    entries: int


def read(step: int) -> Reading:
    """Count what is held now."""
    gc.collect()
    tensors = live_tensors()
    return Reading(
        step,
        len(tensors),
        # a fake tensor has no bytes, and asking one of symbolic size makes expressions that stay
        sum(x.untyped_storage().nbytes() for x in tensors if not isinstance(x, FakeTensor)),
        sys.getallocatedblocks(),
        psutil.Process().memory_info().rss,
        live_entries(),
    )


def live_tensors() -> list[Tensor]:
    """Every tensor that the garbage collector knows."""
    # isinstance would evaluate lazy proxies of other libraries
    return [x for x in gc.get_objects() if issubclass(type(x), Tensor)]


def make_step(subject: Subject) -> Step:
    """A training loop's step over batches of several shapes and paddings; every tenth is followed by an evaluation."""
    family = BY_NAME[subject.family]
    model: Any = family.build(dropout=0.1)
    config = CompressionConfig.from_preset(subject.preset, drop_padding=subject.drop_padding)
    if subject.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1))
    patch_model(model, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    batches = [_cut(family.make_batch(padding, i), 13 - i) for i, padding in enumerate(("right", "none", "left"))]

    def step(index: int) -> None:
        batch = batches[index % len(batches)]
        with mode_of("autocast"):
            model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if index % 10 == 9:
            with torch.no_grad():
                model.eval()(**batch)
            model.train()

    return step


def _cut(batch: Batch, length: int) -> Batch:
    return {name: x[:, :length].contiguous() for name, x in batch.items()}


def soak(step: Step, steps: int, readings: int = 10) -> list[Reading]:
    """Run the steps and take readings at equal distances. There is none in the first fifth, which is a warm-up."""
    first = steps // 5
    at = [first + (steps - first) * i // (readings - 1) for i in range(readings)]
    found = []
    for index in range(steps + 1):
        step(index)
        if index in at:
            found.append(read(index))
    return found


def growth(readings: Sequence[Reading]) -> list[str]:
    """What grew between the first reading and the last, in words; nothing if memory is constant."""
    first, last = readings[0], readings[-1]
    found = []
    if last.tensors > first.tensors:
        found.append(f"tensors: {first.tensors} after step {first.step}, {last.tensors} after step {last.step}")
    if last.tensor_bytes > first.tensor_bytes:
        found.append(f"bytes of tensors: {first.tensor_bytes}, then {last.tensor_bytes}")
    if last.python_blocks > first.python_blocks + PYTHON_BLOCKS:
        found.append(f"blocks of Python: {first.python_blocks}, then {last.python_blocks}")
    if last.resident_bytes > first.resident_bytes + RESIDENT_BYTES:
        found.append(f"resident bytes: {first.resident_bytes}, then {last.resident_bytes}")
    if any(reading.entries for reading in readings):
        found.append(f"registry entries: {[reading.entries for reading in readings]}")
    return found


def main() -> int:
    """Parse the command line and run every subject. Returns the exit status: 1 if anything grew."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    prepare()
    wrong = 0
    for subject in SUBJECTS:
        torch.manual_seed(0)
        readings = soak(make_step(subject), arguments.steps)
        first, last = readings[0], readings[-1]
        print(
            f"{subject.name}: {last.step} steps; tensors {first.tensors} -> {last.tensors}, "
            f"their bytes {first.tensor_bytes} -> {last.tensor_bytes}, Python {first.python_blocks} -> "
            f"{last.python_blocks}, resident {first.resident_bytes} -> {last.resident_bytes}",
            flush=True,
        )
        for line in growth(readings):
            wrong += 1
            print(f"GREW: {line}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
