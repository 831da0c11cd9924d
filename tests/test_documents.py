"""README files and other documents: their code runs, their commands are valid, their paths and figures are right."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from hf_actcompress import PRESETS
from hf_actcompress.ops.table import OPS
from tests.cli.invoke import run
from tests.documents import DOCUMENTS, PACKAGE, ROOT, blocks, check, commands, exists, places, prose
from tests.import_graph import filled

TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in DOCUMENTS}
COMMANDS = list(dict.fromkeys(tuple(words) for text in TEXTS.values() for words in commands(text)))
RESULTS = "recipes/results/readme"
every_document = pytest.mark.parametrize("name", TEXTS)


# libraries that are not installed for the tests
STACKS = ("axolotl", "bitsandbytes", "trl")


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A batch for the documents' code, with a tiny model in place of downloads and a Trainer that does one step."""
    ids = torch.arange(8)[None]
    batch = {"input_ids": ids, "labels": ids}
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: tiny())
    monkeypatch.setattr(transformers.Trainer, "train", lambda trainer: trainer.model(**batch).loss.backward())
    return batch


def tiny() -> Any:
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


# tests/test_upstream.py runs the code of tests/UPSTREAM.md and compares what it prints
@pytest.mark.parametrize(
    "name", [name for name in TEXTS if blocks(TEXTS[name], "python") and name != "tests/UPSTREAM.md"]
)
def test_code_runs(name: str, batch: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a document run in order, in one namespace that has a model and a batch."""
    monkeypatch.chdir(tmp_path)
    namespace = {"batch": batch, "model": tiny()}
    for index, code in enumerate(blocks(TEXTS[name], "python")):
        # an ellipsis among the arguments stands for arguments of the reader's
        exec(compile(code.replace(", ...)", ")"), f"{name} block {index}", "exec"), namespace)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_have_these_options(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    try:
        check(list(words))
    except ModuleNotFoundError as missing:
        # an example for another library needs that library
        if missing.name not in STACKS:
            raise
        pytest.skip(f"{missing.name} is not installed")


@pytest.mark.parametrize(
    "command",
    [
        "python recipes/benchmark.py --speed",
        "python recipes/nowhere.py",
        "python -m tests.fuzz --rounds 1",
        "hf-actcompress estimate x.json --card t4",
        "hf-actcompress guess",
        "pip install '.[all]'",
        "pip install --constrain no.txt x",
        "python -m pytest -m fast",
        "python -m pytest tests/test_nowhere.py",
        "make",
    ],
)
def test_a_wrong_command_is_found(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (words,) = commands(f"```bash\n{command}\n```")
    with pytest.raises((SystemExit, Exception)):
        check(words)


@every_document
def test_places_exist(name: str) -> None:
    document = ROOT / name
    assert not {place for place in places(TEXTS[name]) if not exists(place, document)}


@every_document
def test_lines_are_short(name: str) -> None:
    # rows of tables and comments cannot be broken, so they may be longer
    assert not [
        line for line in prose(TEXTS[name]).splitlines() if len(line) > 120 and not line.startswith(("|", "<!--"))
    ]


def test_the_readme_is_short() -> None:
    assert len(TEXTS["README.md"].splitlines()) <= 150


def test_the_picture_of_the_house_is_that_of_the_code() -> None:
    page = TEXTS["CONTRIBUTING.md"]
    assert "-->" in page.split("```mermaid")[1]
    assert filled(page) == page, "python -m tests.import_graph"


def test_every_row_of_what_to_add_names_a_commit() -> None:
    table = TEXTS["CONTRIBUTING.md"].split("| what | file |")[1].split("\n\n")[0].splitlines()[2:]
    commits = [row.split("|")[-2].strip(" `") for row in table]
    assert len(commits) > 9 and all(re.fullmatch("[0-9a-f]{7}", commit) for commit in commits)
    shallow = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True)
    if shallow.stdout.strip() != "false":
        pytest.skip("a checkout without its history")
    for commit in commits:
        subprocess.run(
            ["git", "merge-base", "--is-ancestor", commit, "HEAD"], cwd=ROOT, check=True, capture_output=True
        )


def test_every_op_is_listed() -> None:
    lines = set(TEXTS["hf_actcompress/ops/README.md"].splitlines())
    rows = {f"| {op.name} | {op.variant} | {op.keeps} | {op.rebuilds} | {op.gradient} |" for op in OPS}
    assert rows <= lines
    assert len([line for line in lines if line[0:1] == "|"]) == len(rows) + 2


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_named(preset: str) -> None:
    text = TEXTS["recipes/results/README.md"]
    assert f"`{preset}`" in text or f"| {preset} |" in text


def test_every_recipe_is_named() -> None:
    text = TEXTS["recipes/README.md"] + TEXTS["recipes/results/README.md"]
    files = [*(ROOT / "recipes").glob("*.py"), *(ROOT / "recipes/stacks").glob("*.py")]
    names = [str(path.relative_to(ROOT)) for path in files if not path.name.startswith("tiny")]
    assert not [name for name in names if f"`{name}`" not in text]


def test_every_readme_of_a_folder_is_linked() -> None:
    """By a link, which a browser follows; each link of the front README leads to a file or folder of the checkout."""
    links = set(re.findall(r"\]\(([^)#]+)\)", TEXTS["README.md"]))
    assert not {name for name in TEXTS if name != "README.md"} - links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_the_peft_matrix_has_these_counts() -> None:
    path = ROOT / "tests/integration/peft_matrix/results/peft_matrix.json"
    table = json.loads(path.read_text())
    column = {name: [row[i] for row in table["rows"]] for i, name in enumerate(table["columns"])}
    counts = Counter(column["status"])
    assert not counts.keys() - {"equal", "close", "refused", "PEFT refuses", "not applicable"}
    said = f"{counts['equal']:,} equal, {counts['close']:,} close, {counts['refused']:,} refused"
    assert said in TEXTS["README.md"]
    assert f"{len(set(column['method']))} methods, {len(set(column['subject']))} models" in TEXTS["README.md"]
    assert {row[0].split()[0] for row in table["rows"] if row[5] == "refused"} == {"glora"}


@pytest.mark.daily(5)
def test_the_estimate_is_what_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the rows of stock and exact are compared, because computing all rows takes a minute."""
    monkeypatch.chdir(ROOT)
    (words,) = (words for words in commands(TEXTS["README.md"]) if "estimate" in words)
    printed = run(*words[1:], "--preset", "exact").stdout.splitlines()
    rows = {line.split("  ")[0]: line.split() for line in printed}
    said = {line.split("  ")[0]: line.split() for line in (ROOT / RESULTS / "estimate.txt").read_text().splitlines()}
    assert {name: rows[name] for name in ("stock", "exact")} == {name: said[name] for name in ("stock", "exact")}


def test_one_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.findall(r"^## (\S+)", TEXTS["CHANGELOG.md"], re.M)[0] == version
    # no other file repeats the version, except the changelog
    assert not [path for path in PACKAGE.rglob("*.py") if "__version__ =" in path.read_text()]
    assert f"-{version}" not in TEXTS["README.md"]


def test_files_for_other_programs_can_be_read() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    hosted = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert [step["run"] for step in hosted["jobs"]["run"]["steps"] if "run" in step] == [".ci/run"]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    for hook in hooks:
        words = hook["entry"].split()
        assert words[0] in ("ruff", "mypy") or (ROOT / words[1]).is_file()


def test_ci_takes_no_arguments() -> None:
    done = subprocess.run([ROOT / ".ci/run", "--fast"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and "--fast" in done.stderr and not done.stdout


def test_the_documents_are_in_the_source_distribution() -> None:
    include = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]
    kept = [name.strip("/") for name in include["include"]]
    for path in (*(Path(name) for name in TEXTS), Path(".github/workflows/ci.yml"), Path("CITATION.cff")):
        assert path.parts[0] in kept or (len(path.parts) == 1 and path.suffix == ".md" and "*.md" in kept), path
