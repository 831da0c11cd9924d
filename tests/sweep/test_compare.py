"""The sweep's comparison detects the differences that it is made for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.sweep.compare import Step, Verdict, compare
from tests.sweep.step import Outcome


def outcome(y: Tensor, **gradients: Tensor) -> Outcome:
    return Outcome({"logits": y}, gradients)


def no_step(_patched: bool | None, _trial: int) -> Outcome:
    raise ValueError("this step cannot be run in fp64")


def verdict(ours: Outcome, stock: Outcome, step: Step = no_step, dtype: str = "fp32") -> Verdict:
    return compare(ours, stock, dtype, step)


@pytest.fixture
def gradient() -> Tensor:
    return torch.randn(64, generator=torch.Generator().manual_seed(0))


def test_equal_outcomes_pass(gradient: Tensor) -> None:
    y = torch.tensor([1.0, float("nan"), float("-inf")])
    seen = verdict(outcome(y, w=gradient), outcome(y.clone(), w=gradient.clone()))
    assert seen == Verdict((), True, "bits")


def test_an_output_off_by_one_rounding_fails(gradient: Tensor) -> None:
    y = torch.ones(3)
    seen = verdict(outcome(torch.nextafter(y, 2 * y), w=gradient), outcome(y, w=gradient))
    assert seen.failures[0].startswith("outputs: logits")


def test_an_output_of_another_dtype_fails(gradient: Tensor) -> None:
    y = torch.ones(3)
    assert verdict(outcome(y.bfloat16(), w=gradient), outcome(y, w=gradient)).failures


@pytest.mark.parametrize(("left", "kind"), [("ours", "extra gradient"), ("stock", "missing gradient")])
def test_a_gradient_on_one_side_alone_fails(gradient: Tensor, left: str, kind: str) -> None:
    y = torch.ones(3)
    both, one = outcome(y, w=gradient, b=gradient), outcome(y, w=gradient)
    seen = verdict(both, one) if left == "ours" else verdict(one, both)
    assert seen.failures[0].startswith(kind)


def test_a_changed_buffer_fails(gradient: Tensor) -> None:
    ours, stock = outcome(torch.ones(3), w=gradient), outcome(torch.ones(3), w=gradient)
    ours.buffers, stock.buffers = {"u": torch.ones(2)}, {"u": torch.zeros(2)}
    assert verdict(ours, stock).failures[0].startswith("buffers: u")


@pytest.mark.parametrize("relative", [1e-7, 1e-2])
def test_without_an_oracle_rounding_passes_and_more_fails(gradient: Tensor, relative: float) -> None:
    y = torch.ones(3)
    seen = verdict(outcome(y, w=gradient * (1 + relative)), outcome(y, w=gradient))
    assert seen.measure == "tolerance"
    assert bool(seen.failures) == (relative > 1e-3)


@pytest.mark.parametrize("times", [0.5, 1.0, 3.0])
def test_with_an_oracle_the_error_may_be_as_large_as_stocks(gradient: Tensor, times: float) -> None:
    """Stock's error is some roundings. Ours may be as large, in another direction, and no larger."""
    y, truth = torch.ones(3), gradient.double()
    error = 1e-6 * torch.randn(64, generator=torch.Generator().manual_seed(1))
    stock, ours = outcome(y, w=gradient + error), outcome(y, w=gradient - times * error)

    def step(patched: bool | None, _trial: int) -> Outcome:
        return outcome(y, w=truth) if patched is None else (ours if patched else stock)

    seen = verdict(ours, stock, step)
    assert seen.measure == "oracle"
    assert bool(seen.failures) == (times > 1)


def test_one_wrong_parameter_among_many_fails() -> None:
    """A wrong gradient of a small parameter is detected in spite of the rounding errors of a large one."""
    y = torch.ones(3)
    large = torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    small = torch.full((4,), 0.01).bfloat16()
    noise = 1 + 0.004 * torch.randn(4096, generator=torch.Generator().manual_seed(1))
    stock, ours = outcome(y, w=large, b=small), outcome(y, w=large, b=2 * small)

    def step(patched: bool | None, _trial: int) -> Outcome:
        exact = outcome(y, w=large.double() * noise, b=small.double())
        return exact if patched is None else (ours if patched else stock)

    assert verdict(ours, stock, step, "bf16").failures[0].startswith("gradients: b")


def test_the_readme_has_the_counts_of_the_table() -> None:
    root = Path(__file__).parents[2]
    counts = json.loads((root / "tests/sweep/results/sweep.json").read_text())["counts"]
    text = (root / "README.md").read_text()
    assert f"{counts['pairs']:,} pairs" in text and f"({counts['types']} types)" in text
