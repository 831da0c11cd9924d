"""The tables in the package are what their scripts compute, and the scripts' building blocks are right."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hf_actcompress.methods.fewbit import tables as fewbit
from hf_actcompress.methods.inverted import tables as inverted

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def script(name: str, path: Path | None = None) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path or RECIPES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def flat(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for key in value for number in flat(value[key])]
    if isinstance(value, (tuple, list)):
        return [number for item in value for number in flat(item)]
    return [float(value)]


def test_fewbit_tables_are_reproduced(tmp_path: Path) -> None:
    path = tmp_path / "fewbit.py"
    script("fit_fewbit").main(path)
    made = script("made", path)
    for name in ("CENTRES", "STEPS", "LEVELS", "GRIDS", "PRIMITIVE_STEPS"):
        here, there = getattr(fewbit, name), getattr(made, name)
        assert here.keys() == there.keys()
        # a border may move within the last grid if another place is as good
        assert flat(here) == pytest.approx(flat(there), abs=1e-3)


def test_an_inverted_fit_is_reproduced() -> None:
    recipe = script("fit_inverted_activations")
    assert recipe.ACTIVATIONS.keys() == inverted.INVERTED.keys()
    fields = recipe.fit(recipe.ACTIVATIONS["silu"])
    here = inverted.INVERTED["silu"]._asdict()
    assert here.keys() == fields.keys()
    for key, value in fields.items():
        assert flat(here[key]) == pytest.approx(flat(value), rel=1e-5, abs=1e-5)


def test_the_dynamic_programme_finds_the_best_of_all_partitions() -> None:
    recipe = script("fit_fewbit")
    points = torch.linspace(-3, 4, 12, dtype=torch.float64)
    function, everything = torch.nn.functional.gelu, torch.arange(12)

    def cost(borders: tuple[float, ...]) -> float:
        edges = torch.tensor([points[0], *borders, points[-1]], dtype=torch.float64)
        squares = recipe.squared_integral(function, points)
        inside = squares[torch.searchsorted(points, edges)].diff()
        return (inside - function(edges).diff().square() / edges.diff()).sum().item()

    for levels in (2, 3, 4):
        found = recipe.best_cells(function, points, everything, levels)
        every = itertools.combinations(points[1:-1].tolist(), levels - 1)
        assert cost(tuple(found.tolist())) == pytest.approx(min(map(cost, every)), abs=1e-12)


def test_the_error_of_a_cell_is_its_integral() -> None:
    recipe = script("fit_fewbit")
    points = recipe.base_grid(-2.0, 3.0)
    x = torch.linspace(-2, 3, 500_001, dtype=torch.float64)
    slope = recipe.derivative(torch.nn.functional.silu, x)
    integral = torch.trapezoid(slope.square(), x).item()
    assert recipe.squared_integral(torch.nn.functional.silu, points)[-1].item() == pytest.approx(integral, abs=1e-9)
