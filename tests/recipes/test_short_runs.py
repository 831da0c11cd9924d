"""Recipes with few steps, whose schedules and shares must not divide by zero; and without a package that they need."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import tomllib
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("accelerate")

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
STEPS = range(1, 11)
# what Python runs at its start so that it does not find a package
HIDING = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
hide = lambda name, *rest: None if name.split(".")[0] == "{package}" else find(name, *rest)
PathFinder.find_spec = staticmethod(hide)
"""


@pytest.fixture(autouse=True)
def _recipes_on_the_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(RECIPES))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("common", "evaluate_presets"):
            del sys.modules[name]


class Line(nn.Module):
    """The cheapest model with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Namespace:
        return Namespace(loss=(pixel_values.flatten(1)[:, :2] @ self.weight - labels).square().mean())


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The learning rate of each step of AdamW."""
    found: list[float] = []
    step = torch.optim.AdamW.step

    def noted(optimizer: Any, *args: Any) -> Any:
        found.append(optimizer.param_groups[0]["lr"])
        return step(optimizer, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", noted)
    return found


@pytest.mark.parametrize("steps", [*STEPS, 150])
def test_images_train_for_any_number_of_steps(steps: int, rates: list[float]) -> None:
    images = importlib.import_module("common.images")
    parts = torch.randn(4, 3, 1, 1), torch.zeros(4)
    data = images.Images("noise", 2, parts, parts)
    args = Namespace(device="cpu", lr=0.1, max_steps=steps, batch_size=2)
    assert len(images.fit_images(Line(), data, args, seed=0)) == len(rates) == steps
    assert all(0 < rate <= 0.1 for rate in rates)
    if steps > 1:
        # it rises from a lower rate, and falls again
        assert rates[0] < max(rates) and (steps == 2 or rates[-1] < max(rates))
    if steps == 150:
        # the warm-up is a fifth, as it was when recipes/results/image was measured
        assert 28 <= rates.index(max(rates)) <= 30


@pytest.mark.parametrize("steps", STEPS)
def test_jobs_train_for_any_number_of_steps(steps: int, rates: list[float]) -> None:
    jobs = importlib.import_module("common.jobs")
    examples = [{"pixel_values": torch.randn(2), "labels": torch.tensor(0.0)} for _ in range(3)]
    jobs.fit(jobs.Job("noise", Line(), 0.1, examples, [], 2), 0, steps)
    assert len(rates) == steps and all(0 < rate <= 0.1 for rate in rates)


def test_the_loops_have_a_rate_for_each_step() -> None:
    rate = importlib.import_module("common.state").learning_rate
    for steps in STEPS:
        for warmup in range(12):
            args = Namespace(lr=0.1, warmup=warmup, max_steps=steps)
            assert all(0 < rate(args, step) < 0.1 + 1e-9 for step in range(steps))


@pytest.mark.parametrize("steps, passes", [(1, 1), (1, 5), (2, 20), (3, 4)])
def test_many_passes_over_few_steps(steps: int, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a sequence to train on, the order of the batches would never end."""
    recipe = importlib.import_module("evaluate_presets")
    seen: list[int] = []
    monkeypatch.setattr(recipe, "fit", lambda run, *_: seen.append(len(run.train)))
    monkeypatch.setattr(recipe, "held_out_loss", lambda run: 0.0)
    job = Namespace(train=list("abcdef"), batch_size=4, model=Line(), untrained=None, lr=0.1)
    recipe.final_loss(job, None, 0, Namespace(steps=steps, passes=passes))
    assert seen == [max(1, 4 * steps // passes)]


@pytest.mark.slow
@pytest.mark.daily(3)
@pytest.mark.parametrize(
    "recipe, package, install",
    [
        ("stacks/trl_dpo.py", "trl", "trl"),
        ("stacks/trl_sft_qlora.py", "peft", "peft"),
        ("stacks/sentence_transformers_loss.py", "sentence_transformers", "sentence-transformers"),
        ("stacks/axolotl_plugin.py", "axolotl", "axolotl"),
        ("stacks/accelerate_loop.py", "accelerate", "accelerate"),
        ("finetune_clm.py", "accelerate", "accelerate"),
        ("chosen_tokens.py", "peft", "peft"),
        # this one is imported in a function
        ("finetune_clm.py --lora", "peft", "peft"),
    ],
)
def test_a_missing_package_is_named(recipe: str, package: str, install: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDING.format(package=package))
    script, *options = recipe.split()
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, str(RECIPES / script), *options],
        env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"needs {install}, which is not installed: pip install {install}\n" in done.stderr


def test_other_errors_are_shown_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    say_missing = importlib.import_module("common.missing").say_missing
    for error in (ModuleNotFoundError("No module named 'trl.old'", name="trl.old"), ValueError("wrong")):
        say_missing(type(error), error, None)
        assert str(error) in capsys.readouterr().err
    # this process is no recipe
    assert sys.excepthook.__name__ != "say_missing"


def _optional() -> set[str]:
    """The packages of the extras for recipes, except for those that transformers brings."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {text.split(">")[0].replace("-", "_") for name in ("recipes", "stacks") for text in extras[name]}
    return names - {"tqdm", "tokenizers"} | {"axolotl"}


@pytest.mark.parametrize(
    "path", sorted([*RECIPES.glob("*.py"), *(RECIPES / "stacks").glob("*.py")]), ids=lambda path: path.name
)
def test_what_names_a_missing_package_is_imported_first(path: Path) -> None:
    names = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    tops = [name.split(".")[0] for name in names]
    needed = [place for place, top in enumerate(tops) if top in _optional()]
    first = [place for place, top in enumerate(tops) if top in ("common", "tiny")]
    assert not needed or (first and first[0] < needed[0])
