"""For compiled modes: what they keep, their peak, how exact they are, and the CPU time of their first step."""

import argparse
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor
from torch._inductor.utils import fresh_cache

from hf_actcompress import kept_bytes, measure_step

from .bench_graphs import counted
from .bench_models import build, shape_of
from .bench_modes import MODES
from .bench_report import read
from .bench_suites import MIB, Forward, Result, gradients, make_batch, make_step

SUITE = "bytes"


def stock_of(mode: str) -> str:
    """The stock mode whose first step a compiled mode is compared with: checkpointed if that mode is."""
    return "checkpointing+compile" if "checkpointing" in mode else "compile"


def earlier(folder: Path) -> list[Result]:
    """The results of this suite that an earlier run has left in the folder."""
    path = folder / "benchmark.jsonl"
    return [result for result in read(path) if result.suite == SUITE] if path.exists() else []


def compiled_bytes(name: str, args: argparse.Namespace, done: list[Result]) -> Iterator[list[Result]]:
    """Measure one model in all modes. `done` are the results so far; modes that are in it are not measured again."""
    for mode in args.modes:
        known = {(result.model, result.mode): result for result in done}
        if (name, mode) not in known:
            done.append(_measured(name, mode, args, known.get((name, stock_of(mode)))))
            yield done


def _measured(name: str, mode: str, args: argparse.Namespace, stock: Result | None) -> Result:
    family, shape = shape_of(name, args)
    result = Result(SUITE, name, mode, args.batch, args.seq_len)
    result.note = MODES[mode].reason_missing(family, args.device)
    if result.note:
        return result
    torch._dynamo.reset()
    _load_compiler()
    batch = make_batch(args.batch, shape.vocab, args)
    model = build(family, shape, args)
    forward = MODES[mode].prepare(model)
    step = make_step(forward, batch, args)
    # compilers in a process pool would not be counted
    with fresh_cache(), inductor.patch(compile_threads=1):
        start = _cpu_seconds()
        graphs, breaks = counted(step)
        result.first_step_s = _cpu_seconds() - start
        if MODES[mode].compiled:
            result.graphs, result.breaks = graphs, breaks
        result.peak_mib = measure_step(step, args.device).peak_bytes / MIB
        kept = [_kept(forward, batch, args)]
        if not args.dropout and not args.lora_dropout:
            result.fp64_error = _error(family, shape, args, model, step)
        # one more layer, because the first checkpointed layer is a special case: its input is the embeddings
        more = replace(shape, layers=shape.layers + 1)
        kept.append(_kept(MODES[mode].prepare(build(family, more, args)), batch, args))
    tokens = batch["input_ids"].numel()
    result.kept_h = (kept[1] - kept[0]) / (tokens * shape.hidden)
    if stock is not None and stock.first_step_s:
        result.first_step_ratio = result.first_step_s / stock.first_step_s
    return result


@cache
def _load_compiler() -> None:
    """Import the compiler, so that the first mode's first step does not include its imports."""
    with fresh_cache():
        torch.compile(torch.add)(torch.ones(2), torch.ones(2))
    torch._dynamo.reset()


def _cpu_seconds() -> float:
    """CPU seconds of this process and of the compilers that it has run; other programs do not change them."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _kept(forward: Forward, batch: dict[str, torch.Tensor], args: argparse.Namespace) -> int:
    def run() -> Any:
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.autocast):
            return forward(**batch)

    run()
    return kept_bytes(run, args.device)


def _error(family: str, shape: Any, args: argparse.Namespace, model: Any, step: Any) -> float:
    """The error of all gradients, against stock's in fp64 with the same weights."""
    found = gradients(model, step).double()
    oracle = build(family, shape, args).to(torch.float64)
    exact = gradients(oracle, make_step(oracle, make_batch(args.batch, shape.vocab, args), args), torch.float64)
    return float((found - exact).norm() / exact.norm())
