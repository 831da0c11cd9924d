"""What the benchmark measures: modes at one batch size, and the largest batch of each under a memory cap."""

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hf_actcompress import find_batch_size, kept_bytes, measure_step

from .bench_graphs import counted, new_graphs
from .bench_models import Shape, build, shape_of
from .bench_modes import MODES, sharing_weights
from .host import Counts

# limits of the relative L2 error over all gradients: several roundings of the dtype, but far less than a wrong term
# causes
GRADIENT_LIMIT = {"float32": 1e-5, "bfloat16": 2e-2}
MIB = 2**20


@dataclass
class Result:
    """One mode of one model. Times are None if the gradients are wrong."""

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
    new_gradients_mib: float | None = None
    total_mib: float | None = None
    graphs: int | None = None
    breaks: int | None = None
    new_graphs: int | None = None
    step_ms: float | None = None
    tokens_per_second: float | None = None
    step_ratio: float | None = None
    fp64_error: float | None = None
    first_step_s: float | None = None
    first_step_ratio: float | None = None
    host_us: float | None = None
    host_ratio: float | None = None
    host: Counts | None = None
    cap: str = ""
    seconds: list[float] = field(default_factory=list)
    stock_seconds: list[float] = field(default_factory=list)

    def add_time(self, seconds: float, stock: float | None, tokens: int, device: str) -> None:
        """Adds one more round of this mode, and of stock in the same round.

        On a GPU medians count, also of the ratio to stock's time. On a CPU minima count, because other programs only
        add to the CPU seconds of a process.
        """
        self.seconds.append(seconds)
        if stock is not None:
            self.stock_seconds.append(stock)
        if not self.correct:
            return
        best = statistics.median(self.seconds) if device == "cuda" else min(self.seconds)
        self.step_ms, self.tokens_per_second = 1000 * best, tokens / best
        if stock is not None:
            pairs = zip(self.seconds, self.stock_seconds, strict=True)
            ratio = statistics.median(ours / theirs for ours, theirs in pairs)
            self.step_ratio = ratio if device == "cuda" else best / min(self.stock_seconds)


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


def gradients(model: Any, step: Callable[[], None], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """All gradients of one step from a fixed seed, as one vector."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    step()
    return torch.cat([p.grad.to(dtype).flatten() for p in model.parameters() if p.grad is not None])


def gradient_errors(name: str, mode: str, args: argparse.Namespace) -> tuple[float, float | None]:
    """The gradient errors against stock and against stock in fp64, with few layers.

    Without dropout if the mode draws other masks; with dropout there is no second error, because fp64 draws others.
    """
    family, shape = shape_of(name, args)
    dropout = args.dropout if MODES[mode].same_masks else 0.0
    model = build(family, replace(shape, layers=_few_layers(shape)[0]), args, dropout)
    batch = make_batch(args.batch, shape.vocab, args)
    stock = gradients(model, make_step(model, batch, args))
    truth = None if dropout else _in_fp64(model, batch, args)
    found = gradients(model, make_step(MODES[mode].prepare(model), batch, args))
    error = float((found - stock).norm() / stock.norm())
    return error, None if truth is None else float((found.double() - truth).norm() / truth.norm())


def _in_fp64(model: Any, batch: dict[str, torch.Tensor], args: argparse.Namespace) -> torch.Tensor:
    """The gradients of a copy of the model with the same weights in fp64, without autocast."""
    oracle = copy.deepcopy(model).to(torch.float64)
    oracle.zero_grad(set_to_none=True)
    args = argparse.Namespace(**{**vars(args), "autocast": False})
    return gradients(oracle, make_step(oracle, batch, args), torch.float64)


def kept_slope(name: str, mode: str, args: argparse.Namespace) -> float:
    """Bytes kept per token per layer in units of the hidden size: what a few more layers add."""
    family, shape = shape_of(name, args)
    batch, kept = make_batch(args.batch, shape.vocab, args), []
    few, more = _few_layers(shape)
    for layers in (few, more):
        forward = MODES[mode].prepare(build(family, replace(shape, layers=layers), args))

        def run(forward: Forward = forward) -> Any:
            with autocast(args):
                return forward(**batch)

        kept.append(kept_bytes(run, args.device))
    return (kept[1] - kept[0]) / (batch["input_ids"].numel() * shape.hidden * (more - few))


def _few_layers(shape: Shape) -> tuple[int, int]:
    """Two numbers of layers. They are small, so that compilers are fast, and enough to see what each layer adds."""
    return (2, 4) if shape.layers >= 4 else (1, 2)


def timed(step: Callable[[], None], device: str) -> float:
    """Seconds of a step: on a GPU until it has done all work, on a CPU those of all threads of this process."""
    if device == "cpu":
        start = time.process_time()
        step()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def total_mib(device: str) -> float | None:
    """The highest point of the whole process on the device since the last measurement began."""
    return torch.cuda.max_memory_allocated() / MIB if device == "cuda" else None


def equal_batch(name: str, args: argparse.Namespace) -> Iterator[list[Result]]:
    """All modes at one batch size: memory, then time in rounds over shared weights.

    Compiled modes come last, each in rounds of its own with stock, so that the others have times if time runs out in a
    compiler. Yields what is known so far, after each mode and each round.
    """
    family, shape = shape_of(name, args)
    bench = _EqualBatch(name, args, build(family, shape, args), make_batch(args.batch, shape.vocab, args))
    eager = [mode for mode in args.modes if not MODES[mode].compiled]
    for group in (eager, *([mode] for mode in args.modes if mode not in eager)):
        yield from bench.measure(group)


@dataclass
class _EqualBatch:
    """One model in several modes over the same weights."""

    name: str
    args: argparse.Namespace
    weights: Any
    batch: dict[str, torch.Tensor]
    results: list[Result] = field(default_factory=list)
    stock: Callable[[], None] | None = None

    def measure(self, modes: Sequence[str]) -> Iterator[list[Result]]:
        """Memory of each mode, then rounds that run each of them once, in turn."""
        steps = []
        for mode in modes:
            result = Result("equal", self.name, mode, self.args.batch, self.args.seq_len)
            step = self._prepared(result)
            self.results.append(result)
            yield self.results
            if step is not None:
                steps.append((result, step))
            if mode == "stock":
                self.stock = step
        gc.collect()
        for _ in range(self.args.rounds if steps else 0):
            self._round(steps)
            yield self.results

    def _prepared(self, result: Result) -> Callable[[], None] | None:
        """The mode's step, after one to warm up; its errors and bytes go into the result. None if it cannot run."""
        mode, args = MODES[result.mode], self.args
        result.note = mode.reason_missing(shape_of(self.name, args)[0], args.device)
        if result.note:
            return None
        if mode.compiled:
            # torch limits recompilations, also those of other modes, and would run this one uncompiled after that
            torch._dynamo.reset()
        result.gradient_error, result.fp64_error = gradient_errors(self.name, result.mode, args)
        # `<=` is false for NaN
        result.correct = not mode.exact or result.gradient_error <= self._limit(mode.compiled)
        result.kept_h = kept_slope(self.name, result.mode, args)
        forward = mode.prepare(sharing_weights(self.weights))
        step = make_step(forward, self.batch, args)
        graphs, breaks = counted(step)  # warm-up, compilation, gradients
        if mode.compiled:
            result.graphs, result.breaks = graphs, breaks
            # on a GPU it is the same number, and the time of a session there is short
            if args.device == "cpu":
                result.new_graphs = new_graphs(lambda batch: make_step(forward, batch, args)(), self.batch)
        result.peak_mib = measure_step(step, args.device).peak_bytes / MIB
        result.total_mib = total_mib(args.device)
        self.weights.zero_grad(set_to_none=True)
        result.new_gradients_mib = measure_step(step, args.device).peak_bytes / MIB
        return step

    def _limit(self, compiled: bool) -> float:
        """The largest gradient error of an exact mode; if it is compiled, 1.1 times compiled stock's may be more."""
        stock = [r.gradient_error or 0.0 for r in self.results if r.mode == "compile"]
        return max([GRADIENT_LIMIT[self.args.grain], *(1.1 * error for error in stock if compiled)])

    def _round(self, steps: Sequence[tuple[Result, Callable[[], None]]]) -> None:
        timed_stock = timed(self.stock, self.args.device) if self.stock is not None else None
        for result, step in steps:
            # stock has been timed for the others already
            seconds = timed_stock if step is self.stock else None
            seconds = seconds or timed(step, self.args.device)
            result.add_time(seconds, timed_stock, self.batch["input_ids"].numel(), self.args.device)


@contextmanager
def capped(cap: str, device: str) -> Iterator[None]:
    """On a GPU, imitates a smaller card: the allocator gives no more than the cap. On a CPU the search counts bytes."""
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

        # the same share of the memory as on a whole card, whose allocator cannot use the last blocks
        budget = cap if args.device == "cpu" else int(0.95 * float(cap.removesuffix("GiB")) * 2**30)
        options = {"optimizer": optimizer, "budget": budget, "trials": args.trials, "timed_steps": args.rounds}
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
