"""What a layer costs the host in each of the benchmark's modes, as recipes/host_time.py counts it."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from .bench_models import Shape, build, shape_of
from .bench_modes import MODES, Forward
from .bench_suites import Result
from .host import counts, host_microseconds

SUITE, HIDDEN = "host", 16


def host_costs(name: str, args: argparse.Namespace) -> list[Result]:
    """One model in all modes, on one thread; modes that a compiler runs are left out."""
    family, _ = shape_of(name, args)
    results = [Result(SUITE, name, mode, 1, 4) for mode in args.modes]
    for result in results:
        mode = MODES[result.mode]
        result.note = "not of compiled modes" if mode.compiled else mode.reason_missing(family, args.device)
    timed = [result for result in results if not result.note]
    builds = [partial(_prepared, family, result.mode, args) for result in timed]
    with one_thread():
        times = host_microseconds(builds, HIDDEN, args.rounds, args.autocast)
        stock = {result.mode: time for result, time in zip(timed, times, strict=True)}.get("stock")
        for result, prepare, time in zip(timed, builds, times, strict=True):
            result.host_us, result.host_ratio = time, time / stock if stock else None
            result.host = counts(prepare, family, HIDDEN, args.autocast)
    return results


def _prepared(family: str, mode: str, args: argparse.Namespace, shape: Shape) -> Forward:
    return MODES[mode].prepare(build(family, shape, args))


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
