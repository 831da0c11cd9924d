"""Stock and patched runs from one seed: what a run leaves behind, and whether two runs agree."""

import argparse
import gc
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from accelerate import Accelerator
from tqdm.auto import tqdm

from hf_actcompress import measure_step

Mode = Literal["stock", "patched", "control"]

# How far apart rounding alone may drive two runs: (the first loss, any loss). Moving every weight of the tiny models by
# one rounding of the dtype, which is what --control does, moved the first loss by at most one unit in the last place in
# float32 and 2.9e-4 in bfloat16, and any loss of 80 steps by 1.4e-5 and 6.7e-2. The table allows some three times that,
# as each is one sample. float16 was not run: it is bfloat16 scaled by the ratio of the two roundings.
# What rounding does grows with steps and learning rate: for any other job --control measures it.
TOLERANCE = {"float32": (4e-6, 5e-5), "bfloat16": (1e-3, 0.2), "float16": (1.25e-4, 0.025)}


@dataclass(frozen=True)
class RunResult:
    """What one training run leaves behind."""

    mode: Mode
    losses: list[float]
    tokens_per_second: float
    metrics: dict[str, float]
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Comparison:
    """Two runs from one seed; the differences are between training losses, step by step."""

    stock: RunResult
    patched: RunResult
    first_tolerance: float
    tolerance: float
    tolerance_source: str
    control: RunResult | None = None
    first_difference: float = field(init=False)
    largest_difference: float = field(init=False)
    agrees: bool = field(init=False)

    def __post_init__(self) -> None:
        first, largest = first_difference(self.stock, self.patched), largest_difference(self.stock, self.patched)
        object.__setattr__(self, "first_difference", first)
        object.__setattr__(self, "largest_difference", largest)
        # Written so that a NaN does not agree.
        object.__setattr__(self, "agrees", first <= self.first_tolerance and largest <= self.tolerance)


def first_difference(one: RunResult, other: RunResult) -> float:
    """The distance between two first losses: of two forwards, before any gradient has acted."""
    return abs(one.losses[0] - other.losses[0])


def largest_difference(one: RunResult, other: RunResult) -> float:
    """The largest distance between two loss curves; NaN where either is."""
    gaps = torch.tensor(one.losses, dtype=torch.float64) - torch.tensor(other.losses, dtype=torch.float64)
    return gaps.abs().max().item()


def compute_dtype(args: argparse.Namespace) -> str:
    """The dtype whose rounding decides how closely two runs can agree."""
    return {"bf16": "bfloat16", "fp16": "float16"}.get(args.mixed_precision, args.dtype)


def measure_peak(accelerator: Accelerator, forward_backward: Callable[[], None]) -> int:
    """Peak bytes of one forward and backward above what stays between steps (weights, gradients, optimizer state)."""
    forward_backward()  # so that the gradients exist before the measured step and are not counted in it
    return measure_step(forward_backward, accelerator.device).peak_bytes


def rounding_of_loss(loss: float, dtype: str) -> float:
    """How far two correct losses that are rounded to `dtype` may differ: two units in the last place.

    A model in 16 bits whose loss function gets the logits as they are (BERT's) returns its loss in 16 bits. Stock's own
    loss is then up to two units away from that of the same logits in float64, so no closer agreement can be asked for.
    """
    return 2 * torch.finfo(getattr(torch, dtype)).eps * 2.0 ** math.floor(math.log2(max(loss, 1e-30)))


def dtype_of_loss(args: argparse.Namespace) -> str:
    """The dtype of the loss of a model that gives its logits to the loss function as they are, as BERT does."""
    return args.dtype if args.mixed_precision in (None, "no") else "float32"


def compare_runs(args: argparse.Namespace, run: Callable[[Mode], RunResult], loss_dtype: str = "float32") -> Comparison:
    """Train once with stock transformers and once patched, on the same batches, and compare the two runs.

    `loss_dtype` is the dtype of the loss that the model returns.
    """
    modes: tuple[Mode, ...] = ("stock", "patched", "control") if args.control else ("stock", "patched")
    results: dict[Mode, RunResult] = {}
    for mode in modes:
        tqdm.write(f"{mode}:", file=sys.stderr)
        results[mode] = run(mode)
        gc.collect()  # or the last run's model is still in memory when the next one starts
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    stock, control = results["stock"], results.get("control")
    dtype = compute_dtype(args)
    (first, largest), source = TOLERANCE[dtype], f"{dtype} rounding, measured on the tiny models"
    if control is not None:
        # The control run is one sample of what rounding does; three times its difference is still of that size.
        first, largest = max(first, 3 * first_difference(stock, control)), 3 * largest_difference(stock, control)
        source = "3 x the control run"
    rounding = rounding_of_loss(stock.losses[0], loss_dtype)
    first, largest = max(first, rounding), max(largest, rounding)
    return Comparison(stock, results["patched"], first, largest, source, control)
