"""The line of assumptions says what figures depend on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.invoke import SIZES, run


def test_assumptions_about_adapters_and_optimizers(model: str) -> None:
    """The rank that peft takes if none is given, and where the states of a paged optimizer are."""
    peft = pytest.importorskip("peft")
    for command in (("estimate", "--quick"), ("estimate", "--preset", "exact"), ("plan", "--gpu", "24")):
        output = run(command[0], model, *SIZES, "--lora", "--optim", "paged_adamw_8bit", *command[1:]).stdout
        assert f'LoRA of rank {peft.LoraConfig().r} on peft\'s "all-linear"' in output, (command, output)
        assert "paged_adamw_8bit with all of its states on the card" in output, (command, output)


def test_the_readme_shows_the_assumptions_of_its_command() -> None:
    root = Path(__file__).parents[2]
    (command,) = re.findall(r"^hf-actcompress (estimate recipes/.*)$", (root / "README.md").read_text(), re.MULTILINE)
    words = [str(root / word) if word.startswith("recipes/") else word for word in command.split()]
    shown = (root / "recipes/results/readme/estimate.txt").read_text().splitlines()
    printed = run(*words, "--preset", "exact").stdout.splitlines()
    assert [line for line in printed if line.startswith("assumed: ")][0] in shown
