"""A short run of the fuzz, with other cases every day, and tests that its rules find differences."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from tests.fuzz.__main__ import fuzz, reproduction
from tests.fuzz.case import Case, cases, parse
from tests.fuzz.check import reduce_by
from tests.fuzz.compare import ABOVE_LAW, compare, same_bits
from tests.fuzz.models import attention_mask, plainest
from tests.fuzz.programs import Seen, run_program

# a night runs more than a push
CASES = 120 if os.environ.get("ALL_CASES") else 30
pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_cases_of_today() -> None:
    """The day is the seed, so that a failure can be repeated. The seed is printed with it."""
    pytest.importorskip("peft")
    day = int(time.time() // 86_400)
    print(f"seed {day}")
    summary = fuzz(CASES, day, quiet=True, keep_going=False)
    assert summary.ran >= CASES // 2
    lines = [f"{rule}: {reproduction(found[0])}" for rule, found in summary.failed.items()]
    assert not lines, f"seed {day}\n" + "\n".join(lines)


@settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_a_case_is_written_on_one_line_and_read_again(case: Case) -> None:
    assert parse(str(case)) == case
    assert case.tidy() == case


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown field 'familly'"):
        parse("familly=bert")


@pytest.mark.parametrize("padding", ["none", "right", "left", "row", "holes"])
def test_masks_are_what_their_name_says(padding: str) -> None:
    mask = attention_mask(Case(padding=padding, batch=4, length=7), torch.Generator().manual_seed(0))
    empty = int((mask.sum(1) == 0).sum())
    assert empty == (padding == "row")
    assert bool((mask == 0).any()) == (padding != "none")


def _changed(seen: Sequence[Seen], name: str, change: float) -> list[Seen]:
    return [replace(s, value=_plus(s.value, change)) if s.name == name else s for s in seen]


def _plus(x: Tensor, change: float) -> Tensor:
    """x with one element changed by that share of the largest one."""
    y = x.clone()
    y.view(-1)[0] += change * x.abs().max()
    return y


BERT = Case(family="bert", loss_head=False)
LLAMA = Case(family="llama", mode="bf16")


@pytest.mark.parametrize(
    ("case", "name", "change", "rule"),
    [
        (BERT, "logits", 1e-6, "forward differs: logits"),
        (BERT, "loss", 1e-6, "forward differs: loss"),
        (BERT, "cls.predictions.bias", 1e-6, "gradient not bit-equal"),
        (BERT, "cls.predictions.bias", float("nan"), "gradient not finite"),
        (LLAMA, "model.norm.weight", 20.0, ABOVE_LAW),
        (replace(LLAMA, preset="int8"), "model.layers.1.mlp.down_proj.weight", 100.0, "error of int8 above its bound"),
    ],
)
def test_a_difference_is_found(case: Case, name: str, change: float, rule: str) -> None:
    stock = run_program(case, "stock")
    assert any(seen.name == name for seen in stock)

    def oracle() -> list[Seen]:
        return run_program(case, "oracle")

    assert compare(case, stock, stock, oracle) == []
    assert [failure.rule for failure in compare(case, _changed(stock, name, change), stock, oracle)] == [rule]


def test_a_missing_gradient_is_found() -> None:
    stock = run_program(BERT, "stock")
    failures = compare(BERT, [s for s in stock if s.name != "cls.predictions.bias"], stock, lambda: None)
    assert [failure.rule for failure in failures] == ["missing gradient"]


def test_nan_equals_nan_and_nothing_else() -> None:
    nan, one = torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, 1.0])
    assert same_bits(nan, nan.clone()) and not same_bits(nan, one) and not same_bits(one, one.double())


def test_a_failing_case_is_reduced_to_what_it_needs() -> None:
    case = Case(family="bert", preset="int8", mode="autocast", batch=5, length=16, padding="left", hidden=True)

    def fails(other: Case) -> bool:
        return other.preset == "int8" and other.padding == "left"

    assert str(reduce_by(case, plainest(case), fails, 100)) == "family=bert padding=left preset=int8"
