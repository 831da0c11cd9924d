"""One (type, class) pair in all modes: a row of the table."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from hf_actcompress import patch_model, patch_report

from . import savings
from .batches import NOTES, find_batch, padded, with_labels
from .catalogue import Pair, model_class
from .compare import Step, Verdict, compare, same
from .configs import tiny_config
from .modes import Mode
from .rules import DROPOUT
from .step import Batch, Outcome, jittered, oracle, prepare, roughened, run, seed_all

# a config with more parameters than this is not tiny
TOO_LARGE = 40_000_000


@dataclass
class Row:
    """What the sweep saw of one pair.

    Attributes:
        skipped: Why nothing was compared; "" if something was.
        passed: Modes without a failure.
        bit_equal: Modes in which every gradient equals stock's bit by bit.
        tolerance: Modes whose gradients could not be compared with an fp64 oracle.
        left_out: Why a mode was not run, by mode.
        failures: What was wrong, by mode.
        saved: The share of stock's kept bytes that the exact preset does not keep, in fp32.
        saved_int8: The same for int8.
        saved_dropout: The same for exact, with dropout on.
        stays: The module that keeps most of the remaining bytes under the exact preset.
        measured: The day of these four.
        kept: The share of stock's kept bytes that stays, by way (the sweep over diffusers alone).
    """

    type: str
    model: str
    task: str = ""
    flag: str = ""
    skipped: str = ""
    passed: list[str] = field(default_factory=list)
    bit_equal: list[str] = field(default_factory=list)
    tolerance: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    failures: dict[str, list[str]] = field(default_factory=dict)
    saved: float | None = None
    saved_int8: float | None = None
    saved_dropout: float | None = None
    stays: str = ""
    measured: str = ""
    kept: dict[str, float] = field(default_factory=dict)
    parameters: int = 0
    patched: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Subject:
    """A pair with its options, which builds the same model again and again."""

    pair: Pair
    options: dict[str, Any]

    def build(self, *, dropout: float = 0.0, attention: str = "") -> Any:
        """The model in train mode, always with the same weights."""
        # the start and the end of a span are the two labels of question answering
        labels = {"num_labels": 2} if self.pair.task == "span" else {}
        config = tiny_config(self.pair.type, dropout=dropout, **labels, **self.options)
        cls = model_class(self.pair)
        config = fitting(config, cls)
        if attention:
            config._attn_implementation = attention
        seed_all(0)
        make = getattr(cls, "_from_config", cls)
        return roughened(make(config)).train()


def fitting(config: Any, cls: Any) -> Any:
    """The config, or the part of it that the class is made from."""
    wanted = getattr(cls, "config_class", None)
    if wanted is None or isinstance(config, wanted):
        return config
    parts = [part for part in vars(config).values() if isinstance(part, wanted)]
    return parts[0] if parts else config


def sweep_pair(pair: Pair, modes: Iterable[Mode], options: dict[str, Any] | None = None, flag: str = "") -> Row:
    """Compare stock and patched in every mode. Raises nothing: what goes wrong is in the row."""
    start = time.monotonic()
    row = Row(pair.type, pair.model, pair.task, flag)
    try:
        _fill(row, Subject(pair, options or {}), modes)
    except Exception as error:
        row.skipped = said(error)
    row.seconds = round(time.monotonic() - start, 2)
    return row


def _fill(row: Row, subject: Subject, modes: Iterable[Mode]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock = subject.build()
        row.parameters = sum(p.numel() for p in stock.parameters())
        if row.parameters > TOO_LARGE:
            raise ValueError(f"too large: {row.parameters:,} parameters")
        plain = find_batch(stock, row.type, row.task)
        labelled = with_labels(stock, plain, row.task)
        if "text alone" in plain:
            row.left_out["pictures or sounds"] = "no layout that is known was taken: text alone"
        for batch in (plain, labelled):
            for note in NOTES:
                batch.pop(note, None)
        if labelled is not plain and refused(stock, labelled):
            labelled = plain
        _note_savings(row, subject, stock, labelled)
        for mode in modes:
            _one_mode(row, subject, stock, mode, labelled if mode.labels else plain)


def refused(stock: Any, batch: Batch) -> bool:
    try:
        run(prepare(copy.deepcopy(stock), Mode("fp32")), batch, Mode("fp32"))
    except Exception:
        return True
    return False


def _one_mode(row: Row, subject: Subject, stock: Any, mode: Mode, batch: Batch) -> None:
    model = _stock_for(row, subject, stock, mode)
    if model is None:
        return
    if mode.padding:
        fewer = padded(batch, mode.padding, stock.config)
        if fewer is None:
            row.left_out[mode.name] = "nothing to pad"
            return
        batch = fewer
    try:
        theirs = run(prepare(copy.deepcopy(model), mode), batch, mode)
    except Exception as error:
        row.left_out[mode.name] = said(error)
        return
    if mode.grad and not _says_something(theirs):
        row.left_out[mode.name] = "stock's loss is not finite, or all its gradients are zero"
        return
    ours = copy.deepcopy(model)
    try:
        ours = prepare(patch_model(ours, strict=False), mode)
        row.patched = len(patch_report(ours).patched)
        mine = run(ours, batch, mode)
    except Exception as error:
        row.failures[mode.name] = [f"exception: {said(error)}"]
        return
    verdict = compare(mine, theirs, mode.dtype, _repeated(model, batch, mode))
    if verdict.failures and not _repeats(theirs, run(prepare(copy.deepcopy(model), mode), batch, mode)):
        row.left_out[mode.name] = "stock differs from one run to the next"
        return
    _note(row, mode, verdict)


def _repeats(first: Outcome, second: Outcome) -> bool:
    """Whether stock gives the same outputs twice: some models draw a seed of their own."""
    return all(same(x, second.outputs[name]) for name, x in first.outputs.items())


def _says_something(outcome: Outcome) -> bool:
    """Whether a comparison with it could fail: a finite loss, and a gradient that is not zero."""
    finite = bool(outcome.outputs["own loss"].isfinite())
    return finite and any(bool(g.isfinite().all() and g.any()) for g in outcome.gradients.values())


def _repeated(model: Any, batch: Batch, mode: Mode) -> Step:
    """The mode's step of the patched model, of the stock one or in fp64, with weights of a trial."""

    def step(patched: bool | None, trial: int) -> Outcome:
        other = jittered(model, trial)
        if patched is None:
            return oracle(other, batch, mode)
        return run(prepare(patch_model(other, strict=False) if patched else other, mode), batch, mode)

    return step


def _stock_for(row: Row, subject: Subject, stock: Any, mode: Mode) -> Any:
    """The stock model that a mode needs; None, and the reason in the row, if it cannot be made."""
    model = stock
    try:
        if mode.dropout or mode.attention:
            model = subject.build(dropout=mode.dropout, attention=mode.attention)
        if mode.dtype == "bf16":
            model = copy.deepcopy(model).to(torch.bfloat16)
    except Exception as error:
        row.left_out[mode.name] = said(error)
        return None
    if mode.attention and model.config._attn_implementation == stock.config._attn_implementation and not mode.asked:
        row.left_out[mode.name] = f"{mode.attention} is the model's only attention"
        return None
    if mode.dropout and not _has_dropout(model):
        row.left_out[mode.name] = "no dropout in the config"
        return None
    return model


def _has_dropout(model: Any) -> bool:
    def positive(config: Any) -> bool:
        own = vars(config)
        return any(DROPOUT.search(k) and isinstance(v, float) and v > 0 for k, v in own.items()) or any(
            positive(v) for v in own.values() if hasattr(v, "model_type")
        )

    return positive(model.config)


def _note(row: Row, mode: Mode, verdict: Verdict) -> None:
    if verdict.failures:
        row.failures[mode.name] = list(verdict.failures)[:6]
    else:
        row.passed.append(mode.name)
    if verdict.bit_equal and mode.grad:
        row.bit_equal.append(mode.name)
    if verdict.measure == "tolerance":
        row.tolerance.append(mode.name)


def _note_savings(row: Row, subject: Subject, stock: Any, batch: Batch) -> None:
    try:
        savings.measure(row, stock, batch)
        dropping = subject.build(dropout=0.1)
        row.saved_dropout = savings.saved(dropping, batch, "exact")[0] if _has_dropout(dropping) else row.saved
    except Exception as error:
        row.left_out["saved"] = said(error)


def said(error: BaseException) -> str:
    """One line of what an exception said."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
