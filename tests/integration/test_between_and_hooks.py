"""What users do between forward and backward, and hooks that read and write: losses and gradients are stock's.

A failing case is one of the fuzz: the message is the command that runs it alone.
"""

from __future__ import annotations

import pytest

from tests.fuzz.__main__ import reproduction
from tests.fuzz.between import BETWEEN
from tests.fuzz.case import Case
from tests.fuzz.check import check
from tests.fuzz.hooks import PLACES, modules_at
from tests.fuzz.models import build
from tests.fuzz.programs import run_program
from tests.fuzz.tables import FAMILIES, WITHOUT, between_cases, hook_cases

pytestmark = pytest.mark.filterwarnings("ignore")
BETWEEN_CASES, HOOK_CASES = dict(between_cases()), dict(hook_cases())


def _assert_as_stock(case: Case) -> None:
    if case.lora != "none":
        pytest.importorskip("peft")
    lines = [f"{failure.rule}: {failure.detail}" for failure in check(case)]
    assert not lines, "\n".join([*lines, reproduction(case)])


@pytest.mark.daily(24)
@pytest.mark.parametrize("name", BETWEEN_CASES)
def test_between_forward_and_backward(name: str) -> None:
    _assert_as_stock(BETWEEN_CASES[name])


@pytest.mark.daily(24)
@pytest.mark.parametrize("name", HOOK_CASES)
def test_hooks(name: str) -> None:
    _assert_as_stock(HOOK_CASES[name])


@pytest.mark.parametrize("plans", [True, False])
@pytest.mark.parametrize("preset", ["exact", "int8", "tempo"])
def test_a_merge_under_autocast(preset: str, plans: bool) -> None:
    """Stock has kept the casts of weights that ours casts again, so ours has to refuse what merging wrote on them."""
    _assert_as_stock(Case(mode="autocast", lora="plain", between="merge", preset=preset, plans=plans))


@pytest.mark.parametrize("between", BETWEEN)
def test_each_row_has_gradients_or_an_error(between: str) -> None:
    """Otherwise the row could not fail."""
    pytest.importorskip("peft")
    try:
        seen = run_program(Case(between=between, dropout=0.1).tidy(), "stock")
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error) and between.startswith("optimizer-step")
        return
    assert any(s.kind == "gradient" and bool(s.value.any()) for s in seen) == (between != "freeze")


@pytest.mark.parametrize("family", FAMILIES)
def test_each_place_of_the_table_has_modules(family: str) -> None:
    """Otherwise a hook would be put on nothing, and its case could not fail."""
    model = build(Case(family=family), "stock")
    assert [place for place in PLACES if not modules_at(model, place)] == [*WITHOUT.get(family, ())]
