"""README's measured tables are those of the results files."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    return importlib.import_module("readme_tables")


def test_readme_is_up_to_date(recipe) -> None:
    assert recipe.BLOCK.search((RECIPES.parent / "README.md").read_text())
    assert recipe.main(["--check"]) == 0


def test_a_table_below_its_heading(recipe) -> None:
    text = "## a\n\n| x |\n|---|\n| 1 |\n\n## b\n\ntext\n| x |\n|---|\n| 2 |"
    assert recipe.table(text, "b") == "| x |\n|---|\n| 2 |"
    assert recipe.table(text, None) == "| x |\n|---|\n| 1 |"
    with pytest.raises(ValueError):
        recipe.table(text, "c")
