"""The measured tables and pictures are those of the results files."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from hf_actcompress.quick.cards import card_bytes
from hf_actcompress.quick.colours import way_colour

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    return importlib.import_module("readme_tables")


def test_readmes_are_up_to_date(recipe) -> None:
    texts = {path.relative_to(recipe.ROOT).as_posix(): path.read_text() for path in recipe.documents()}
    assert len(recipe.TABLE.findall(texts["README.md"])) == 2 and len(recipe.TEXT.findall(texts["README.md"])) == 1
    assert len(recipe.TEXT.findall(texts["hf_actcompress/README.md"])) == 1
    assert len(recipe.TABLE.findall(texts["recipes/results/README.md"])) == 12
    assert recipe.main(["--check"]) == 0


def test_another_figure_in_a_results_file_is_found(recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "README.md").write_text("<!-- text: block.txt -->\n<!-- end of text -->\n")
    (tmp_path / "block.txt").write_text("1\n")
    monkeypatch.setattr(recipe, "ROOT", tmp_path)
    assert recipe.main(["--check"]) == 1
    assert recipe.main([]) == 0 and recipe.main(["--check"]) == 0
    assert "```text\n1\n```" in (tmp_path / "README.md").read_text()
    (tmp_path / "block.txt").write_text("2\n")
    assert recipe.main(["--check"]) == 1


def test_the_picture_of_a_block_is_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    picture = importlib.import_module("block_picture")
    text = "\n".join(picture.drawn(picture.block_bytes())) + "\n"
    assert text == (RECIPES / "results" / "readme" / "block.txt").read_text()


def test_figures_beside_other_tools_are_measured() -> None:
    """Each peak with its time in README's comparison is that of a committed run on the GPU."""
    rows = []
    for name in ("llama-1b", "llama-1b-compiled", "llama-1b-checkpointing"):
        text = (RECIPES / "results" / "gpu" / name / "benchmark.jsonl").read_text()
        rows += [json.loads(line) for line in text.splitlines()]
    measured = {(f"{row['peak_mib'] / 1024:.1f}", f"{row['step_ratio']:.2f}") for row in rows}
    said = re.findall(r"(\d\.\d) GiB, (\d\.\d\d)", (RECIPES.parent / "README.md").read_text())
    assert len(said) == 6 and set(said) <= measured


def test_a_table_below_its_heading(recipe) -> None:
    text = "## a\n\n| x |\n|---|\n| 1 |\n\n## b\n\ntext\n| x |\n|---|\n| 2 |"
    assert recipe.table(text, "b") == "| x |\n|---|\n| 2 |"
    assert recipe.table(text, None) == "| x |\n|---|\n| 1 |"
    with pytest.raises(ValueError):
        recipe.table(text, "c")


def test_some_columns_of_a_table(recipe) -> None:
    text = "| x | y, z | w |\n|---|---|---|\n| 1 | 2 | |"
    assert recipe.table(text, None, ["y, z", "w"]) == "| y, z | w |\n| --- | --- |\n| 2 |  |"
    with pytest.raises(ValueError):
        recipe.table(text, None, ["y"])


def test_from_how_many_tokens_exact_is_free(recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that is named in the committed table computes this table again."""
    monkeypatch.chdir(recipe.ROOT)
    committed = (RECIPES / "results" / "host" / "free_from.md").read_text()
    words = shlex.split(committed.splitlines()[0].strip("`"))[2:]
    assert importlib.import_module("host_time").main([*words, "--out", str(tmp_path)]) == 0
    assert recipe.table((tmp_path / "free_from.md").read_text(), None) == recipe.table(committed, None)
    # 42e6 FLOPs per token, at 66e12 FLOPs per second
    free_from = importlib.import_module("common.free_from")
    assert free_from.tokens(588, 7_000_000, 165, 0.4) == pytest.approx(588e-6 * 66e12 / 42e6)
    rows = [{"model": "llama", "mode": "exact", "microseconds": [600.0], "ratios": [ratio]} for ratio in (1.0, 1.01)]
    record = {"device": "a CPU", "options": {"dropout": 0.0}, "rows": rows}
    first, later = [line for line in free_from.table([record], 0.4).splitlines() if "llama-1b" in line]
    assert first.count(free_from.FIRST) == len(free_from.PEAKS) and free_from.FIRST not in later


def test_each_picture_shows_the_data_beside_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each PNG of a results folder is drawn by `recipes/pictures.py` in the package's colours, and names its data."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(RECIPES))
    pictures = importlib.import_module("pictures")
    drawing, ways = importlib.import_module("common.drawing"), ("stock", "exact", "int8", "liger", "exact+compile")
    assert [drawing.colour_of(way) for way in ways] == [way_colour(way) for way in ways]
    for compiled in (f"{way} layers-compiled" for way in ways):
        assert drawing.colour_of(compiled) == way_colour(compiled) == way_colour(compiled.split()[0])
    named = importlib.import_module("longest_context").NAMES
    assert {name: round(card_bytes(name) / 2**30) for name in named.values()} == {n: size for size, n in named.items()}
    drawn = [path for path, _, _ in pictures.pictures()]
    assert sorted(drawn) == sorted((RECIPES / "results").rglob("*.png")) and not pictures.outdated()
    # a changed figure is found, and drawing again mends it
    picture, sources, draw = next(row for row in pictures.pictures() if row[0].parent.name == "experts")
    copies = [Path(shutil.copy(path, tmp_path)) for path in (picture, *sources)]
    monkeypatch.setattr(pictures, "pictures", lambda: [(copies[0], tuple(copies[1:]), draw)])
    assert not pictures.outdated()
    copies[1].write_text(copies[1].read_text().replace('"kept_h": ', '"kept_h": 1'))
    assert pictures.outdated() == [copies[0]] and pictures.main(["--check"]) == 1
    assert pictures.main([]) == 0 and not pictures.outdated()
