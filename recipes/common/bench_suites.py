"""What the benchmark measures: modes at one batch size, and the largest batch of each under a memory cap."""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hf_actcompress import find_batch_size, kept_bytes, measure_step

from .bench_models import build, shape_of
from .bench_modes import MODES, sharing_weights

# relative L2 error over all gradients: several roundings of the dtype, and far below what a wrong term makes
GRADIENT_LIMIT = {"float32": 1e-5, "bfloat16": 2e-2}
MIB = 2**20


@dataclass
class Result:
    """One mode of one model. Times are None where the gradients are not what they should be."""

    suite: str
    model: str
    mode: str
    batch: int
    seq_len: int
    gradient_error: float | None = None
    correct: bool = True
    note: str = ""
    kept_h: float | None = None
    peak_mib: float | None = None
    total_mib: float | None = None
    step_ms: float | None = None
    tokens_per_second: float | None = None
    step_ratio: float | None = None
    cap: str = ""
    seconds: list[float] = field(default_factory=list)


Forward = Callable[..., Any]


def make_step(forward: Forward, batch: dict[str, torch.Tensor], args: argparse.Namespace) -> Callable[[], None]:
    """One forward and backward, under autocast on request."""

    def step() -> None:
        with autocast(args):
            loss = forward(**batch).loss
        loss.backward()

    return step


def autocast(args: argparse.Namespace) -> torch.autocast:
    return torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.autocast)


def make_batch(size: int, vocab: int, args: argparse.Namespace) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, vocab, (size, args.seq_len), generator=torch.Generator().manual_seed(0)).to(args.device)
    return {"input_ids": ids, "labels": ids}


def gradients(model: Any, step: Callable[[], None]) -> torch.Tensor:
    """All gradients of one step from a fixed seed, as one fp32 vector."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    step()
    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


def gradient_error(name: str, mode: str, args: argparse.Namespace) -> float:
    """Against stock; without dropout where the mode draws other masks."""
    family, shape = shape_of(name, args)
    dropout = args.dropout if MODES[mode].same_masks else 0.0
    model = build(family, shape, args, dropout)
    batch = make_batch(args.batch, shape.vocab, args)
    exact = gradients(model, make_step(model, batch, args))
    found = gradients(model, make_step(MODES[mode].prepare(model), batch, args))
    return float((found - exact).norm() / exact.norm())


def kept_slope(name: str, mode: str, args: argparse.Namespace) -> float:
    """Bytes kept per token per layer in units of the hidden size, between half of the layers and all of them."""
    family, shape = shape_of(name, args)
    batch, kept = make_batch(args.batch, shape.vocab, args), []
    halves = (shape.layers // 2, shape.layers)
    for layers in halves:
        forward = MODES[mode].prepare(build(family, replace(shape, layers=layers), args))

        def run(forward: Forward = forward) -> Any:
            with autocast(args):
                return forward(**batch)

        kept.append(kept_bytes(run, args.device))
    return (kept[1] - kept[0]) / (batch["input_ids"].numel() * shape.hidden * (halves[1] - halves[0]))


def timed(step: Callable[[], None], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def total_mib(device: str) -> float | None:
    """The highest point of the whole process on the device since the last measurement began."""
    return torch.cuda.max_memory_allocated() / MIB if device == "cuda" else None


def equal_batch(name: str, args: argparse.Namespace) -> list[Result]:
    """All modes at one batch size: time and memory. Rounds go through the modes in turn, over shared weights."""
    results, steps = [], []
    family, shape = shape_of(name, args)
    weights = build(family, shape, args)
    batch = make_batch(args.batch, shape.vocab, args)
    for mode in args.modes:
        result = Result("equal", name, mode, args.batch, args.seq_len)
        results.append(result)
        result.note = MODES[mode].reason_missing(family, args.device)
        if result.note:
            continue
        result.gradient_error = gradient_error(name, mode, args)
        # `<=` is false for a NaN
        result.correct = not MODES[mode].exact or result.gradient_error <= GRADIENT_LIMIT[args.grain]
        result.kept_h = kept_slope(name, mode, args)
        step = make_step(MODES[mode].prepare(sharing_weights(weights)), batch, args)
        step()  # warm-up, compilation, gradients
        result.peak_mib = measure_step(step, args.device).peak_bytes / MIB
        result.total_mib = total_mib(args.device)
        steps.append((result, step))
    gc.collect()
    for _ in range(args.rounds):
        for result, step in steps:
            result.seconds.append(timed(step, args.device))
    _finish(results, batch["input_ids"].numel())
    return results


def _finish(results: list[Result], tokens: int) -> None:
    """Medians, and the ratio to stock within each round; none for a mode whose gradients are wrong."""
    stock = next((result.seconds for result in results if result.mode == "stock"), [])
    for result in results:
        if not result.seconds or not result.correct:
            continue
        median = statistics.median(result.seconds)
        result.step_ms, result.tokens_per_second = 1000 * median, tokens / median
        if stock:
            result.step_ratio = statistics.median(a / b for a, b in zip(result.seconds, stock, strict=True))


@contextmanager
def capped(cap: str, device: str) -> Iterator[None]:
    """On a GPU, a smaller card: the allocator hands out no more than the cap. On a CPU the search counts bytes."""
    if device == "cpu":
        yield
        return
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, float(cap.removesuffix("GiB")) * 2**30 / whole))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def largest_batch(name: str, mode: str, cap: str, args: argparse.Namespace) -> Result:
    """The largest batch that trains under the cap with AdamW, and tokens/s there."""
    family, shape = shape_of(name, args)
    note = MODES[mode].reason_missing(family, args.device)
    result = Result("largest", name, mode, 0, args.seq_len, note=note, cap=cap)
    if note:
        return result
    gc.collect()
    with capped(cap, args.device):
        model = build(family, shape, args)
        forward = MODES[mode].prepare(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

        def step(batch: dict[str, torch.Tensor]) -> None:
            make_step(forward, batch, args)()
            optimizer.step()
            optimizer.zero_grad()

        options = {"optimizer": optimizer, "budget": cap, "trials": args.trials, "timed_steps": args.rounds}
        report = find_batch_size(model, lambda size: make_batch(size, shape.vocab, args), step, **options)
    fitting = [trial for trial in report.trials if trial.fits]
    if not fitting:
        result.note = "no batch that was tried fits"
        return result
    best = max(fitting, key=lambda trial: trial.batch_size)
    result.batch, result.total_mib = best.batch_size, (best.peak_bytes or 0) / MIB
    result.step_ms, result.tokens_per_second = 1000 * (best.seconds or 0), best.tokens_per_second
    result.note = "" if report.settled else f"a larger one may fit: {args.trials} trials"
    return result
