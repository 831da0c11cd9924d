"""One cell of the matrix: a scenario is run on our side and on stock, and the results are compared."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_actcompress import CompressionConfig, patch_model, unpatch_model
from hf_actcompress.records import clear
from tests.families import BODY

from .method import Method, NotApplicableError
from .scenarios import SCENARIOS
from .side import ORDERS, STOCK, Observation, Side, Tensors
from .subjects import Subject

# Relative to the L2 norm of all tensors of a step. Sums in another order than stock's differ by about 1e-7 in fp32. A
# step above its tolerance is compared with stock in fp64: our error may be LAW times stock's.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
LAW = 1.1
# stock's own error must be below this, or else the fp64 run did another thing than stock; in bf16 it may be a tenth
SAME_STEP = 0.5
README = Path(__file__).parents[3] / "hf_actcompress" / "README.md"
# a part of GLoRA's error message for a layer whose class is not exactly torch's
_EXACT_TYPE = "is not a plain torch.nn.Linear"
GOOD = ("equal", "close", "refused")
SKIPPED = ("not applicable", "PEFT refuses", "no gradient")


@dataclass(frozen=True)
class Mode:
    """Dtype of the weights, and what `patch_model` is told. `family_mode` is the key of `Family.bit_equal`."""

    dtype: torch.dtype
    preset: CompressionConfig | str
    family_mode: str


MODES: dict[str, Mode] = {
    "fp32": Mode(torch.float32, BODY, "fp32"),
    "bf16": Mode(torch.bfloat16, BODY, "bf16"),
    # with the loss head, whose gradients are close to stock's and not equal
    "whole": Mode(torch.float32, "exact", ""),
}
# stock in fp64, which is taken as the truth
WIDE = Mode(torch.float64, BODY, "")
# which scenarios run in which mode: all of them in fp32, a few in the other modes
PLAYS: tuple[tuple[str, str], ...] = (
    *((scenario, "fp32") for scenario in SCENARIOS), ("train", "bf16"), ("train", "whole"), ("disable", "whole"),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One result. `status` is one of GOOD, of SKIPPED, or "different", "stays stock", "crash", "does not unpatch"."""

    method: str
    subject: str
    scenario: str
    mode: str
    order: str
    status: str
    detail: str = ""

    @property
    def good(self) -> bool:
        return self.status in GOOD


@dataclass(frozen=True)
class Played:
    """A side after its scenario: its observations, and the types of all modules after the last step.

    `late` says that the last adapter came after `patch_model`.
    """

    late: bool
    trace: tuple[Observation, ...]
    types: tuple[str, ...]
    model: nn.Module | None
    weights: tuple[Tensors, ...]

    @property
    def root(self) -> str:
        modules = self.model.named_modules() if self.model is not None else ()
        return next((name for name, module in modules if isinstance(module, PreTrainedModel)), "")


def play(
    method: Method, subject: Subject, scenario: str, mode: Mode, order: str, folder: Path, stock: Played | None = None
) -> Played:
    """Run a scenario. An error ends it and becomes its last observation."""
    clear()
    reference = stock.weights if stock is not None else ()
    side = Side(method, subject, order, folder / order, mode.preset, mode.dtype, reference)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            SCENARIOS[scenario](side)
        except NotApplicableError:
            raise
        except Exception as error:
            label = f"after {side.trace[-1].label!r}" if side.trace else "at the start"
            side.trace.append(Observation(label, error=error))
    return Played(side.late, tuple(side.trace), _types(side.model), side.model, tuple(side.weights))


def run_cell(method: Method, subject: Subject, scenario: str, mode: str) -> list[Row]:
    """The rows of both orders, against one stock run."""
    subject = method.subject(subject)
    with tempfile.TemporaryDirectory() as folder:
        try:
            stock = play(method, subject, scenario, MODES[mode], STOCK, Path(folder))
        except NotApplicableError as error:
            found = [("not applicable", str(error))] * len(ORDERS)
        else:
            ideal = _ideal(stock, MODES[mode])

            def truth() -> Played:
                return play(method, subject, scenario, WIDE, STOCK, Path(folder) / "wide", stock)

            found = []
            for order in ORDERS:
                ours = play(method, subject, scenario, MODES[mode], order, Path(folder), stock)
                found.append(_judge(ours, stock, ideal, truth, subject, mode))
    names = (method.name, subject.name, scenario, mode)
    return [Row(*names, order, *result) for order, result in zip(ORDERS, found, strict=True)]


def _types(model: nn.Module | None) -> tuple[str, ...]:
    if model is None:
        return ()
    return tuple(f"{name}: {type(module).__name__}" for name, module in model.named_modules())


def _ideal(stock: Played, mode: Mode) -> tuple[str, ...]:
    """The types of the final stock model's modules if it is patched now. Modules that came late must have them too."""
    if stock.model is None:
        return ()
    types = _types(patch_model(stock.model, mode.preset, strict=False))
    unpatch_model(stock.model)
    return types


def _judge(
    ours: Played, stock: Played, ideal: tuple[str, ...], truth: Callable[[], Played], subject: Subject, mode: str
) -> tuple[str, str]:
    """Status and detail of one comparison."""
    steps = [seen for seen in stock.trace if seen.error is None]
    failure = stock.trace[-1].error
    if not steps:
        return "PEFT refuses", _first_line(failure)
    if not any(
        float(x.abs().max()) > 0 for seen in steps for n, x in seen.tensors.items() if n != "loss" and x.numel()
    ):
        return "no gradient", "stock has none"
    verdict, detail = _compare(ours.trace[: len(steps)], steps, truth, subject, mode)
    if verdict not in ("equal", "close"):
        return verdict, detail
    if failure is not None:
        return verdict, f"{detail} up to where PEFT refuses: {_first_line(failure)}".strip()
    missing = sorted(set(ideal) ^ set(ours.types))
    if any(name.startswith(ours.root) for name in missing):
        return "stays stock", f"{len(missing) // 2} modules, as {missing[0]}"
    if missing and not ours.late:
        return "stays stock", f"{len(missing) // 2} modules outside of the base model, as {missing[0]}"
    if missing:
        # `patch_model` was given the base model alone, and PEFT puts these modules outside of it
        detail = f"{detail}; {len(missing) // 2} modules outside of the base model stay stock".removeprefix("; ")
    assert ours.model is not None
    try:
        unpatch_model(ours.model)
    except Exception as error:
        return "does not unpatch", _first_line(error)
    if _types(ours.model) != stock.types:
        return "does not unpatch", next(a for a, b in zip(_types(ours.model), stock.types, strict=False) if a != b)
    return verdict, detail


def _compare(
    ours: tuple[Observation, ...], stock: list[Observation], truth: Callable[[], Played], subject: Subject, mode: str
) -> tuple[str, str]:
    bit_equal = MODES[mode].family_mode in subject.family.bit_equal
    tolerance = TOLERANCES[MODES[mode].dtype]
    worst = 0.0
    for index, (seen, expected) in enumerate(zip(ours, stock, strict=False)):
        if seen.error is not None:
            return _refusal(seen)
        if seen.tensors.keys() != expected.tensors.keys():
            names = sorted(seen.tensors.keys() ^ expected.tensors.keys())
            return "different", f"{seen.label}: missing or extra {names[:3]}"
        error, name = _error(seen, expected)
        allowed = 0.0 if bit_equal else tolerance
        if math.isnan(error) or (error > allowed and (bit_equal or not _as_true(seen, expected, truth, index))):
            return "different", f"{seen.label}: relative error {error:.1e}, first in {name}"
        worst = max(worst, error)
    if len(ours) < len(stock):
        return "crash", "ended early"
    return ("close", f"relative error {worst:.0e}") if worst > 0 else ("equal", "")


def _as_true(seen: Observation, stock: Observation, truth: Callable[[], Played], index: int) -> bool:
    """Whether our error against stock in fp64 is at most LAW times the error of stock."""
    wide = truth().trace[index]
    if wide.error is not None or wide.tensors.keys() != stock.tensors.keys():
        return False
    error, own = _error(seen, wide)[0], _error(stock, wide)[0]
    return own < SAME_STEP and error <= LAW * own


def _error(seen: Observation, expected: Observation) -> tuple[float, str]:
    """The L2 norm of the differences over that of the expected values, and the first name that differs."""
    error = size = 0.0
    first = ""
    for name, x in expected.tensors.items():
        difference = float((seen.tensors[name].double() - x.double()).square().sum())
        first = first or (name if difference != 0 else "")
        error += difference
        size += float(x.double().square().sum())
    return (math.sqrt(error / size) if size else math.sqrt(error)), first


def _refusal(seen: Observation) -> tuple[str, str]:
    """An error is a refusal if it says which order works. For PEFT's own error the README must say it."""
    message = str(seen.error)
    text = README.read_text() if _EXACT_TYPE in message else message
    named = "patch_model" in text and "get_peft_model" in text
    return "refused" if named else "crash", f"{seen.label}: {_first_line(seen.error)}"


def _first_line(error: Exception | None) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
