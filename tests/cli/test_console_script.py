"""The console script starts without torch, documents its exit codes and prints plain text."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hf_actcompress
from hf_actcompress.cli import app
from hf_actcompress.cli.common import Exit, Rows
from hf_actcompress.quick import hub
from tests.cli.invoke import run


def fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_needs_neither_torch_nor_transformers():
    out = fresh(
        "import sys\nfrom typer.testing import CliRunner\nfrom hf_actcompress.cli import app\n"
        "for command in ([], ['estimate'], ['plan'], ['report'], ['doctor'], ['bench'], ['env'], ['page']):\n"
        "    result = CliRunner().invoke(app, [*command, '--help'])\n"
        "    assert result.exit_code == 0 and 'Exit codes' in result.stdout, result.output\n"
        "print([name for name in ('torch', 'transformers', 'numpy', 'matplotlib') if name in sys.modules])"
    )
    assert out.strip() == "[]"


def test_help_is_quick():
    """The limit is on CPU time, so other processes do not matter. It is about ten times what the command takes."""
    start = time.process_time()
    before = os.times().children_user
    subprocess.run([sys.executable, "-m", "hf_actcompress.cli", "--help"], capture_output=True, check=True)
    assert os.times().children_user - before + time.process_time() - start < 2.0


def test_exit_codes_are_documented():
    text = " ".join(run("--help").stdout.split())
    assert [int(code) for code in re.findall(r"(\d) ", text[text.index("Exit codes:") :])] == [e.value for e in Exit]


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (("nowhere.json",), Exit.NO_MODEL, "no such file or folder"),
        (("{model}", "--preset", "int9"), Exit.USAGE, "unknown preset 'int9'"),
        (("{model}", "--optimizer", "lion"), Exit.USAGE, "unknown optimizer"),
        (("{model}", "--dtype", "int3"), Exit.USAGE, "unknown dtype"),
        (("{model}", "--gpu", "24 apples"), Exit.USAGE, "no size"),
        (("{model}", "--batch-size", "0"), Exit.USAGE, "--batch-size"),
        ((), Exit.USAGE, "model"),
    ],
)
def test_errors_are_messages_and_exit_codes(model, arguments, code, message):
    result = run("estimate", *(argument.format(model=model) for argument in arguments))
    assert result.exit_code == code
    assert message in result.stderr.replace("\n", " ") and "Traceback" not in result.output
    assert result.stdout == ""


@pytest.mark.parametrize(
    "said, advice",
    [("We couldn't connect to the hub", "config.json"), ("401: you are accessing a gated repo", "hf auth login")],
)
def test_a_model_that_cannot_be_had_says_what_to_do(monkeypatch, said, advice):
    import transformers

    def refuse(name, **options):
        raise OSError(said)

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    # the hub answers
    monkeypatch.setattr(hub, "reachable", lambda name: True)
    result = run("estimate", "somebody/some-model", "--no-cache")
    assert result.exit_code == Exit.NO_MODEL and result.stdout == ""
    assert advice in result.stderr and "Traceback" not in result.output


def test_a_json_that_is_no_config(tmp_path):
    path = tmp_path / "other.json"
    path.write_text("{}")
    result = run("estimate", str(path))
    assert result.exit_code == Exit.NO_MODEL and "model_type" in result.stderr


def test_bench_runs_what_it_finds(tmp_path, monkeypatch):
    recipe = tmp_path / "recipes" / "benchmark.py"
    recipe.parent.mkdir()
    recipe.write_text(
        "import sys, pathlib\nprint('seen', sys.argv[1:])\n"
        "if '--out' in sys.argv:\n"
        "    out = pathlib.Path(sys.argv[sys.argv.index('--out') + 1])\n"
        "    (out / 'benchmark.jsonl').write_text('{\"a\": 1}\\n{\"a\": 2}\\n')\n"
        "sys.exit(7 if '--fail' in sys.argv else 0)\n"
    )
    monkeypatch.chdir(tmp_path)

    def bench(*arguments):
        command = [sys.executable, "-m", "hf_actcompress.cli", "bench", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert bench("--quick", "--models", "bert").stdout == "seen ['--quick', '--models', 'bert']\n"
    assert bench("--fail").returncode == 7
    done = bench("--json", "--quick")
    assert json.loads(done.stdout) == [{"a": 1}, {"a": 2}] and "seen" in done.stderr


def test_bench_without_recipes():
    result = run("bench", "--recipe", "nowhere/benchmark.py")
    assert result.exit_code == Exit.MISSING and "--recipe" in result.stderr


def test_the_real_recipe_is_found(monkeypatch):
    from hf_actcompress.cli.bench import find_recipe

    monkeypatch.chdir("/")
    assert find_recipe() == Path(hf_actcompress.__file__).resolve().parents[1] / "recipes" / "benchmark.py"


def test_env_names_versions_kernels_and_conflicts(monkeypatch):
    from importlib import metadata

    import torch

    data = json.loads(run("env", "--json").stdout)
    assert data["packages"]["torch"] == torch.__version__ and data["conflicts"] == []
    assert set(data["kernels"]) and data["gpu"]
    stock = metadata.version
    versions = {"transformers": "4.40.0", "liger-kernel": "0.6"}
    monkeypatch.setattr(metadata, "version", lambda name: versions.get(name) or stock(name))
    data = json.loads(run("env", "--json").stdout)
    assert any("transformers 4.40.0" in text and ">=5.17" in text for text in data["conflicts"])
    assert any("liger-kernel" in text for text in data["conflicts"])
    assert "conflict 1" in run("env").stdout


def test_env_says_what_a_bug_report_needs(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("HF_TOKEN", "secret")
    text = run("env").stdout
    for name in ("hf-actcompress", "location", "python", "platform", "cpu", "gpu", "cuda of torch", "transformers"):
        assert re.search(rf"^{name} +\S", text, re.M), name
    assert re.search(r"^PYTORCH_ALLOC_CONF +expandable_segments:True$", text, re.M)
    assert "secret" not in text


def test_env_of_a_checkout_that_is_not_installed(monkeypatch):
    from importlib import metadata

    stock = metadata.distribution

    def unknown(name):
        if name == "hf-actcompress":
            raise metadata.PackageNotFoundError(name)
        return stock(name)

    # importlib.metadata's `version` and `requires` both call `distribution`
    monkeypatch.setattr(metadata, "distribution", unknown)
    result = run("env")
    assert result.exit_code == 0 and "not installed, running from source" in result.stdout


def test_rows_are_aligned_as_they_come() -> None:
    rows = Rows({"name": 9, "size": 2}, ("size",))
    lines = [rows.line(row) for row in (("name", "of"), ("a [b]", "1"), ("long name", "22"))]
    assert lines == ["name       of", "a [b]       1", "long name  22"]


def test_the_package_logs_afterwards_as_before(tmp_path: Path) -> None:
    """The command restores the log level, because the process may continue after it, as it does in these tests."""
    logger = logging.getLogger("hf_actcompress")
    before = logger.level
    found = CliRunner().invoke(app, ["estimate", str(tmp_path / "none.json")])
    assert found.exit_code != 0 and logger.level == before
