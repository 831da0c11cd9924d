"""Two outcomes of the same step: what differs, and whether the difference is rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.oracle import EXACT

from .step import Outcome

# how far gradients may be apart where no fp64 oracle can be run: the rounding of the dtype that computes
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2, "autocast": 2e-2}
# how far stock itself may be from an oracle that computes the same function
SAME_FUNCTION = {"fp32": 1e-3, "bf16": 0.5, "autocast": 0.5}
EPS = {"fp32": torch.finfo(torch.float32).eps, "bf16": torch.finfo(torch.bfloat16).eps}
EPS["autocast"] = EPS["bf16"]
# one parameter's gradient is a small sample of errors, so its own error may be above stock's by chance
PARAMETER = 4.0
# steps with other weights that are added where the law seems broken
TRIALS = 4

Tensors = dict[str, Tensor]
Errors = dict[str, tuple[float, float, float]]
Step = Callable[[bool | None, int], Outcome]


@dataclass(frozen=True)
class Verdict:
    """What a mode showed.

    Attributes:
        failures: "kind: what and by how much", empty if all is well.
        bit_equal: Whether every gradient equals stock's bit by bit.
        measure: "bits", "oracle" or "tolerance": with what the gradients were compared.
    """

    failures: tuple[str, ...]
    bit_equal: bool
    measure: str


def compare(ours: Outcome, stock: Outcome, dtype: str, step: Step) -> Verdict:
    """Outputs and buffers bit by bit; gradients bit by bit, else against fp64, else within a tolerance.

    Args:
        ours: What the patched model gave.
        stock: What the stock model gave.
        dtype: The mode's: "fp32", "bf16" or "autocast".
        step: Runs the step again: of the patched model (True), of the stock one (False) or in fp64 (None), with weights
            that differ a little from trial to trial. Trial 0 is the step that is compared.
    """
    failures = [*_bits("outputs", ours.outputs, stock.outputs), *_bits("buffers", ours.buffers, stock.buffers)]
    failures += _one_sided(ours.gradients, stock.gradients)
    names = ours.gradients.keys() & stock.gradients.keys()
    for n in sorted(names):
        a, b = ours.gradients[n], stock.gradients[n]
        if a.dtype != b.dtype or a.shape != b.shape:
            failures.append(f"gradient dtype: {n}: {a.dtype} {tuple(a.shape)}, stock {b.dtype} {tuple(b.shape)}")
    differing = sorted(n for n in names if not same(ours.gradients[n], stock.gradients[n]))
    if not differing:
        return Verdict(tuple(failures), True, "bits")
    wrong, measure = _rounding(step, (ours, stock), sorted(names), dtype)
    return Verdict((*failures, *wrong), False, measure)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit-equal, with NaN equal to NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return (
        torch.equal(a, b) or bool(torch.all((a == b) | (a.isnan() & b.isnan())))
        if a.is_floating_point()
        else torch.equal(a, b)
    )


def _bits(kind: str, ours: dict[str, Tensor], stock: dict[str, Tensor]) -> list[str]:
    out = []
    for name in [*stock, *(n for n in ours if n not in stock)]:
        if name not in ours or name not in stock:
            out.append(f"{kind}: {name} only {'in stock' if name in stock else 'ours'}")
        elif ours[name].dtype != stock[name].dtype or ours[name].shape != stock[name].shape:
            a, b = ours[name], stock[name]
            out.append(f"{kind}: {name} {a.dtype} {tuple(a.shape)}, stock {b.dtype} {tuple(b.shape)}")
        elif not same(ours[name], stock[name]):
            apart = (ours[name].double() - stock[name].double()).abs()
            out.append(f"{kind}: {name} differs by up to {apart.nan_to_num(9e99).max():.2g}")
    return out


def _one_sided(ours: dict[str, Tensor], stock: dict[str, Tensor]) -> list[str]:
    out = []
    for kind, left, right in (("missing gradient", stock, ours), ("extra gradient", ours, stock)):
        names = sorted(left.keys() - right.keys())
        if names:
            zero = " (zero)" if not any(bool(left[n].any()) for n in names) else ""
            out.append(f"{kind}: {len(names)}{zero}, the first {names[0]}")
    return out


def _rounding(step: Step, first: tuple[Outcome, Outcome], names: list[str], dtype: str) -> tuple[list[str], str]:
    """Whether gradients that are not bit-equal differ by rounding alone, and how this was decided."""
    ours, stock = (outcome.gradients for outcome in first)
    exact = _truth(step, stock, names, dtype)
    if exact is None:
        apart = distance(ours, stock, names)
        message = f"gradients: {apart:.2g} from stock's, no oracle{_worst(ours, stock, names)}"
        return ([] if apart <= TOLERANCES[dtype] else [message]), "tolerance"
    errors = _errors(ours, stock, exact, names)
    wrong = _law(errors, EPS[dtype])
    # one step is one sample of rounding errors; more steps with other weights tell chance from a defect
    for trial in range(1, 1 + TRIALS if wrong else 1):
        stock_again, ours_again = step(False, trial).gradients, step(True, trial).gradients
        exact = _truth(step, stock_again, names, dtype, trial)
        if exact is not None:
            errors = _added(errors, _errors(ours_again, stock_again, exact, names))
    return _law(errors, EPS[dtype]) if wrong else [], "oracle"


def _truth(step: Step, stock: Tensors, names: list[str], dtype: str, trial: int = 0) -> Tensors | None:
    """Gradients in fp64; None where the step cannot be run in fp64, or is another function there."""
    try:
        exact = step(None, trial).gradients
    except Exception:
        return None
    fits = all(n in exact for n in names) and distance(stock, exact, names) < SAME_FUNCTION[dtype]
    return exact if fits else None


def _errors(ours: Tensors, stock: Tensors, exact: Tensors, names: list[str]) -> Errors:
    """For each parameter: our squared error, stock's own, the true gradient's square."""

    def square(x: Tensor) -> float:
        return float(x.double().square().sum())

    return {
        n: (square(ours[n].double() - exact[n]), square(stock[n].double() - exact[n]), square(exact[n])) for n in names
    }


def _added(a: Errors, b: Errors) -> Errors:
    return {n: (a[n][0] + b[n][0], a[n][1] + b[n][1], a[n][2] + b[n][2]) for n in a}


def _law(errors: Errors, eps: float) -> list[str]:
    """Our error is at most 1.1 times stock's, all parameters together; no single one is far off."""
    ours, own, size = (sum(e[i] for e in errors.values()) ** 0.5 for i in range(3))
    if not ours <= EXACT * max(own, eps / 2 * size):
        worst = max(errors, key=lambda n: errors[n][0] - errors[n][1])
        return [f"gradients: error {ours / (size or 1):.2g}, stock's own {own / (size or 1):.2g}, most in {worst}"]
    for n, squares in errors.items():
        a, b, length = (x**0.5 for x in squares)
        if not a <= PARAMETER * max(b, eps * length, 1e-2 * eps * size):
            return [f"gradients: {n}: error {a / (length or 1):.2g}, stock's own {b / (length or 1):.2g}"]
    return []


def distance(grads: dict[str, Tensor], reference: dict[str, Tensor], names: list[str]) -> float:
    """L2 of all differences over L2 of the reference, in fp64."""
    error = sum(float((grads[n].double() - reference[n].double()).square().sum()) for n in names)
    size = sum(float(reference[n].double().square().sum()) for n in names)
    return float((error / max(size, 1e-300)) ** 0.5)


def _worst(ours: dict[str, Tensor], stock: dict[str, Tensor], names: list[str]) -> str:
    def apart(n: str) -> float:
        return float((ours[n].double() - stock[n].double()).norm() / stock[n].double().norm().clamp_min(1e-30))

    worst = max(names, key=apart)
    return f"; {worst} by {apart(worst):.2g}"
