"""One class in all ways: a row of the table."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable
from datetime import date
from inspect import Parameter
from typing import Any

from torch import nn

from hf_actcompress import patch_model, patch_report, unpatch_model

from ..compare import Step, Verdict, compare, distance, same
from ..pair import Row, said
from ..step import Outcome, jittered, roughened, seed_all
from .classes import parameters
from .given import INPUTS
from .inputs import batch
from .overrides import CONFIGS
from .sizes import tiny
from .ways import WAYS, Batch, LeftOut, Way, adapt, exact_step, kept, prepared, stepped

# a config with more parameters than this is not tiny
TOO_LARGE = 20_000_000
# how far gradients under int8 may be from stock's, all together
LOSSY = 0.05


def subject(cls: Any) -> tuple[Any, Batch]:
    """The class's tiny model in train mode, always with the same weights, and its batch."""
    made = tiny(cls, CONFIGS.get(cls.__name__, {}))
    defaults = {name: value for name, value in parameters(cls.__init__).items() if value is not Parameter.empty}
    config = defaults | made
    seed_all(0)
    model = roughened(cls(**made)).train()
    given = INPUTS.get(cls.__name__, lambda config: {})
    return model, batch(cls, config, given(config))


def sweep_class(package: str, cls: Any, ways: Iterable[Way]) -> Row:
    """Compare stock and patched in every way. Raises nothing: what goes wrong is in the row."""
    start = time.monotonic()
    row = Row(package, cls.__name__)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _fill(row, cls, ways)
    except Exception as error:
        row.failures["stock"] = [f"the catalogue's model or batch: {said(error)}"]
    row.seconds = round(time.monotonic() - start, 2)
    return row


def _fill(row: Row, cls: Any, ways: Iterable[Way]) -> None:
    model, inputs = subject(cls)
    row.parameters = sum(p.numel() for p in model.parameters())
    if row.parameters > TOO_LARGE:
        raise ValueError(f"too large: {row.parameters:,} parameters")
    for way in ways:
        try:
            _one_way(row, model, inputs, way)
        except LeftOut as why:
            row.left_out[way.name] = str(why)
    row.saved, row.saved_int8 = (_saved(row, name) for name in ("fp32", "int8"))
    row.measured = date.today().isoformat()


def _saved(row: Row, name: str) -> float | None:
    return round(1 - row.kept[name], 3) if name in row.kept else None


def _one_way(row: Row, model: Any, inputs: Batch, way: Way) -> None:
    base = adapt(prepared(model, Way(""))) if way.adapted else model
    stock, theirs = _stocks(base, inputs, way)
    try:
        ours = prepared(base, way, lambda copied: patch_model(copied, way.preset, strict=False))
        mine = stepped(ours, inputs, way)
        row.patched = len(patch_report(ours).patched)
        row.kept[way.name] = round(kept(ours, inputs, way) / kept(prepared(base, way), inputs, way), 3)
    except Exception as error:
        row.failures[way.name] = [f"exception: {said(error)}"]
        return
    _note(row, way, verdict_of(mine, theirs, way, _repeated(base, inputs, way)))
    _note_unpatched(row, way, ours, stock, inputs)


def _stocks(base: Any, inputs: Batch, way: Way) -> tuple[Any, Outcome]:
    """Stock's model and step. A way that stock itself cannot go is left out, but for the first one."""
    try:
        stock = prepared(base, way)
        outcome = stepped(stock, inputs, way)
        if not all(bool(g.isfinite().all()) for g in outcome.gradients.values()):
            raise ArithmeticError("gradients are not finite")
        if not any(bool(g.any()) for g in outcome.gradients.values()):
            raise ArithmeticError("all gradients are zero")
        return stock, outcome
    except (LeftOut, MemoryError):
        raise
    except Exception as error:
        if way == WAYS[0]:
            raise
        raise LeftOut(f"stock: {said(error)}") from error


def verdict_of(ours: Outcome, stock: Outcome, way: Way, step: Step) -> Verdict:
    """By the law for exact presets. Under lossy ones gradients may be off by some percent, and outputs by nothing."""
    if way.preset == "exact":
        return compare(ours, stock, way.dtype, step)
    forward = compare(Outcome(ours.outputs, {}, ours.buffers), Outcome(stock.outputs, {}, stock.buffers), "fp32", step)
    failures = list(forward.failures)
    if ours.gradients.keys() != stock.gradients.keys():
        failures.append(f"gradients of other parameters: {sorted(ours.gradients.keys() ^ stock.gradients.keys())[:2]}")
    apart = distance(ours.gradients, stock.gradients, sorted(ours.gradients.keys() & stock.gradients.keys()))
    # a comparison the other way round would pass NaN
    if not apart <= LOSSY:
        failures.append(f"gradients: {apart:.2g} from stock's")
    return Verdict(tuple(failures), apart == 0, "tolerance")


def _repeated(base: Any, inputs: Batch, way: Way) -> Step:
    """The way's step of the patched model, of the stock one or in fp64, with weights of a trial."""

    def step(patched: bool | None, trial: int) -> Outcome:
        other = jittered(base, trial)
        if patched is None:
            return exact_step(other, inputs, way)
        change = (lambda copied: patch_model(copied, way.preset, strict=False)) if patched else (lambda copied: copied)
        return stepped(prepared(other, way, change), inputs, way)

    return step


def _note(row: Row, way: Way, verdict: Verdict) -> None:
    if verdict.failures:
        row.failures[way.name] = list(verdict.failures)[:6]
    else:
        row.passed.append(way.name)
    if verdict.bit_equal:
        row.bit_equal.append(way.name)
    elif verdict.measure == "tolerance" and way.preset == "exact":
        row.tolerance.append(way.name)


def _note_unpatched(row: Row, way: Way, ours: nn.Module, stock: nn.Module, inputs: Batch) -> None:
    """`unpatch_model` gives stock's classes back, and stock's step bit by bit."""
    unpatch_model(ours)
    for model in (ours, stock):
        model.zero_grad(set_to_none=True)
    if [type(m) for m in ours.modules()] != [type(m) for m in stock.modules()]:
        row.failures.setdefault(way.name, []).append("unpatched: classes are not stock's")
    a, b = (stepped(model, inputs, way) for model in (ours, stock))
    pairs = [(part, name) for part in ("outputs", "gradients", "buffers") for name in getattr(b, part)]
    if not all(same(getattr(a, part)[name], getattr(b, part)[name]) for part, name in pairs):
        row.failures.setdefault(way.name, []).append("unpatched: a step differs from stock's")
