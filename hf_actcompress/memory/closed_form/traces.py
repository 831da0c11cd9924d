"""One step of a probe, as polynomials: what is kept by role, and the moments at which the most may be alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import nn

from ..estimation.fake_step.setting import Setting
from ..estimation.fake_step.step import FakeStep, run_step
from ..estimation.growth import growth_of
from .symbols import Polynomial, Reader

FEWEST = 2


@dataclass(frozen=True)
class SymbolicTrace:
    """Kept bytes by role, and live bytes at each allocation of a step, as polynomials in the sizes, of which the number
    of layers is one.
    """

    kept: dict[str, Polynomial]
    moments: Sequence[Polynomial]


def symbolic_trace(
    short: nn.Module, longer: nn.Module, setting: Setting, reader: Reader, period: int = 1
) -> SymbolicTrace:
    """The trace of a model, from two models on the meta device with two and three times `period` layers."""
    base, more = (run_step(model, setting, roles=True) for model in (short, longer))
    growth = growth_of(base, more)
    first, end = _moments(base, reader)
    end_of_longer = _moments(more, reader)[1]
    at_end = end_of_longer.plus(end, -1)
    count = len(base.forward)
    reached = [
        growth.forward[0] > count - 1 - i if i < count else growth.backward[0] > i - count for i in range(len(first))
    ]
    moments = [
        by_layers(moment, at_end if in_reach else Polynomial(), period)
        for moment, in_reach in zip(first, reached, strict=True)
    ]
    short_roles, long_roles = (_roles(step, reader) for step in (base, more))
    kept = {}
    for role, found in long_roles.items():
        fewest = short_roles.get(role, Polynomial())
        kept[role] = by_layers(fewest, found.plus(fewest, -1), period)
    rest = by_layers(end, at_end, period)
    for found in kept.values():
        rest.add(found, -1)
    kept["other"] = kept.get("other", Polynomial()).plus(rest)
    return SymbolicTrace({role: found for role, found in kept.items() if found}, moments)


def by_layers(base: Polynomial, growth: Polynomial, period: int = 1) -> Polynomial:
    """The polynomial for any number of layers, from the one for the fewest and what `period` more layers add."""
    return base.plus(growth, -FEWEST).plus(growth.times("layers"), Fraction(1, period))


def _roles(step: FakeStep, reader: Reader) -> dict[str, Polynomial]:
    assert step.history is not None
    sizes: dict[str, list[int]] = {}
    for role, nbytes in step.history.kept:
        sizes.setdefault(role, []).append(nbytes)
    return {role: reader.total(found) for role, found in sizes.items()}


def _moments(step: FakeStep, reader: Reader) -> tuple[list[Polynomial], Polynomial]:
    """Live bytes at each mark, and at the end of the forward."""
    history: Any = step.history
    live, done, at_marks = Polynomial(), 0, []
    end = reader.total(history.changes[: history.at_end])
    for mark in history.marks:
        live = live.plus(reader.total(history.changes[done:mark]))
        done = mark
        at_marks.append(live)
    return at_marks, end
