"""fidelity_report: `exact` has no error, the figures agree with the gradients, and the model is not changed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from hf_actcompress import CompressionConfig, FidelityComparison, compare_presets, fidelity_report, patch_model
from hf_actcompress.errors import MissingExtraError
from hf_actcompress.patching import unpatch_model
from tests.families import BY_NAME, step

FAMILY = BY_NAME["gpt2-gelu-tanh"]
BATCH = FAMILY.make_batch("none")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_exact_is_exact() -> None:
    report = fidelity_report(FAMILY.build(torch.bfloat16, dropout=0.1), BATCH, seeds=1)
    assert report.preset == "exact"
    assert report.relative_error == report.bias == 0 and report.cosine == pytest.approx(1)
    assert report.kept_bytes < report.stock_bytes


def test_the_figures_are_those_of_the_gradients() -> None:
    model = FAMILY.build(torch.float32)
    _, exact = step(model, BATCH)
    _, lossy = step(patch_model(model, "int4"), BATCH)
    unpatch_model(model)
    difference = sum(float((lossy[n].double() - exact[n].double()).square().sum()) for n in exact)
    norm = sum(float(exact[n].double().square().sum()) for n in exact)
    report = fidelity_report(model, BATCH, "int4", seeds=1)
    assert report.relative_error == pytest.approx((difference / norm) ** 0.5, rel=1e-6)
    (row,) = [row for row in report.parameters if row.name == "transformer.h.0.mlp.c_fc.weight"]
    one = (lossy[row.name].double() - exact[row.name].double()).norm() / exact[row.name].double().norm()
    assert row.relative_error == pytest.approx(float(one), rel=1e-6)


def test_stochastic_rounding_averages_out() -> None:
    model = FAMILY.build(torch.float32)
    config = CompressionConfig(mlp="int4_stochastic")
    few, many = (fidelity_report(model, BATCH, config, seeds=n) for n in (1, 16))
    assert few.bias == pytest.approx(few.relative_error)
    # draws are independent, so the error of their mean falls as 1 / sqrt(n)
    assert many.bias < 0.5 * many.relative_error


def test_it_leaves_the_model_as_it_was() -> None:
    model = patch_model(FAMILY.build(torch.float32, dropout=0.1), "int8")
    classes = [type(m) for m in model.modules()]
    state = torch.get_rng_state()
    fidelity_report(model, BATCH, "int4", seeds=2)
    assert [type(m) for m in model.modules()] == classes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_comparison_draws_and_serialises(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    comparison = compare_presets(FAMILY.build(torch.float32), BATCH, ("exact", "int8"), seeds=1)
    comparison.plot(tmp_path / "fidelity.png")
    assert (tmp_path / "fidelity.png").stat().st_size > 1000
    assert [row["preset"] for row in json.loads(comparison.to_json())["reports"]] == ["exact", "int8"]
    assert "int8: gradient error" in str(comparison)


def test_seeds_must_be_positive() -> None:
    with pytest.raises(ValueError, match="seeds"):
        fidelity_report(FAMILY.build(torch.float32), BATCH, seeds=0)


def test_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"hf-actcompress\[plot\]"):
        FidelityComparison(()).plot(tmp_path / "fidelity.png")
