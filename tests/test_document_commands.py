"""Which test runs each command of README.md and the recipes' two pages, or why no test runs exactly that command.

`test_documents.py` runs all Python blocks, and parses the options of every command.
"""

from __future__ import annotations

import re

import pytest

from tests.cli.invoke import run
from tests.documents import ROOT, commands

RECIPES = "tests/recipes/"
# the beginning of a command -> the file that runs it, and how
ELSEWHERE = {
    "python3 -m venv": ".ci/run: the commands that make an environment and run the suite are read from README.md",
    "pip install -q": ".ci/run: the same; '.[recipes]' is a part of '.[test]'",
    "pip install": ".ci/packages: both packages, each in an empty environment; here nothing is installed",
    "hf-actcompress estimate recipes/configs/llama-1b.json": "tests/test_documents.py: two of its rows; all take 10 s",
    "python recipes/finetune_clm.py": f"{RECIPES}test_recipes.py: with fewer steps; these take minutes",
    "accelerate launch": "tests/integration/test_engines.py: FSDP2 on two processes; my-model is the reader's own",
    "python recipes/stacks/trl_sft_qlora.py": f"{RECIPES}test_stacks.py: three steps, where bitsandbytes is installed",
    "python recipes/benchmark.py": f"{RECIPES}test_measurements.py: small sizes; these take minutes",
    "python recipes/packed_batches.py": f"{RECIPES}test_measurements.py: small sizes",
    "python recipes/chosen_tokens.py": f"{RECIPES}test_measurements.py: small sizes; this takes hours",
    "python recipes/keys_before_rotation.py": f"{RECIPES}test_measurements.py: small sizes; this takes seven minutes",
    "python recipes/finetune_image.py": f"{RECIPES}test_papers.py: few steps; this takes an hour",
    "python recipes/image_peaks.py": f"{RECIPES}test_papers.py: one setting and preset; all take three minutes",
    "python recipes/bf16_errors.py": f"{RECIPES}test_measurements.py: three settings of two batches",
    "python recipes/reproduce.py": f"{RECIPES}test_papers.py: some claims; all take ten minutes",
    "python recipes/measure_on_gpu.py": f"{RECIPES}test_measure_on_gpu.py: its rehearsal; the rest needs a GPU",
    "python -m pytest": ".ci/run: the second command of README.md",
    "pytest": "tests/documents.py: the suite has these tests; here, that the file has what -k asks for",
}
HERE = {"hf-actcompress estimate recipes/configs/llama-8b.json"}
TEXTS = {name: (ROOT / name).read_text() for name in ("README.md", "recipes/README.md", "recipes/results/README.md")}
COMMANDS = sorted({" ".join(words).replace(".venv/bin/", "") for text in TEXTS.values() for words in commands(text)})


def test_every_command_is_run_somewhere() -> None:
    known = (*ELSEWHERE, *HERE)
    assert not [command for command in COMMANDS if not command.startswith(known)]
    assert not [beginning for beginning in known if not any(command.startswith(beginning) for command in COMMANDS)]


@pytest.mark.parametrize("place", sorted({said.split(":")[0] for said in ELSEWHERE.values()}))
def test_the_files_that_run_them_are_there(place: str) -> None:
    assert (ROOT / place).is_file()


def test_env() -> None:
    result = run("env")
    assert result.exit_code == 0 and "transformers" in result.stdout


@pytest.mark.daily(3)
def test_qlora_of_an_8b_model_is_what_the_recipes_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the rows of stock and exact are computed."""
    monkeypatch.chdir(ROOT)
    (command,) = (command for command in COMMANDS if "llama-8b.json" in command)
    result = run(*command.split()[1:], "--preset", "exact")
    said = re.search(r"stock needs (\S+ GiB), patched (\S+ GiB)", TEXTS["recipes/README.md"])
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line}
    assert said is not None and rows["strategy"][1] == "GiB"
    assert tuple(f"{rows[name][1]} GiB" for name in ("stock", "exact")) == said.groups()
