"""Hooks on modules: a checkpointed layer runs again with those of its first run, and what they write is not lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.fuzz.case import Case
from tests.fuzz.check import check
from tests.fuzz.compare import relative
from tests.fuzz.programs import run_program

pytestmark = pytest.mark.filterwarnings("ignore")


def _error(case: Case) -> float:
    """The relative difference to stock's gradients without checkpointing."""
    stock = run_program(replace(case, checkpointing="none"), "stock")
    theirs = {(seen.stage, seen.name): seen.value for seen in stock if seen.kind == "gradient"}
    ours = [seen for seen in run_program(case, "ours") if seen.kind == "gradient"]
    assert len(ours) == len(theirs)
    return relative([(seen.value, theirs[seen.stage, seen.name]) for seen in ours])


@pytest.mark.daily(4)
@pytest.mark.parametrize("plans", [True, False])
@pytest.mark.parametrize("between", ["add-hooks", "remove-hooks"])
@pytest.mark.parametrize("family", ["llama", "bert", "mixtral"])
def test_hooks_that_come_or_go_before_backward(family: str, between: str, plans: bool) -> None:
    """Stock computes with the hooks of the backward then, so the truth is stock's without checkpointing."""
    case = Case(family=family, between=between, plans=plans, checkpointing="non-reentrant", place="norm").tidy()
    assert _error(case) < 1e-5


@pytest.mark.daily(4)
@pytest.mark.parametrize("checkpointing", ["non-reentrant", "reentrant"])
@pytest.mark.parametrize("preset", ["tempo", "inverted"])
@pytest.mark.parametrize(("family", "place"), [("llama", "norm"), ("bert", "linear"), ("bert", "mlp")])
def test_outputs_that_hooks_write_on(family: str, place: str, preset: str, checkpointing: str) -> None:
    """These presets keep outputs of norms and activations, but not where hooks write there unseen by autograd."""
    case = Case(family=family, preset=preset, checkpointing=checkpointing, hook="scale-data", place=place, at=1)
    assert _error(case) < 1e-4


@pytest.mark.daily(4)
@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant", "reentrant"])
@pytest.mark.parametrize(("hook", "place", "at"), [("pre-mul", "dropout", 2), ("pre-scale-data", "linear", 6)])
@pytest.mark.parametrize(("family", "mode"), [("llama", "fp32"), ("bert", "bf16")])
def test_a_write_on_what_another_adapter_has_read(
    family: str, mode: str, hook: str, place: str, at: int, checkpointing: str
) -> None:
    """Stock's dropout keeps a mask alone and a cast nothing, so what they read may be written on after them."""
    pytest.importorskip("peft")
    lora: dict[str, Any] = {"lora": "dropout", "mode": mode, "checkpointing": checkpointing}
    assert not check(Case(family=family, hook=hook, place=place, at=at, **lora))


@pytest.mark.parametrize("family", ["gpt2-gelu-new", "bert"])
def test_a_program_that_runs_again_has_the_dropout_of_its_first_run(family: str) -> None:
    changed: dict[str, Any] = {"checkpointing": "non-reentrant", "between": "dropout-rate", "dropout": 0.1}
    assert _error(Case(family=family, plans=True, **changed)) < 1e-5
