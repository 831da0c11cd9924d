"""What the command says before it computes anything: versions, presets, and words that it does not know."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hf_actcompress import PRESETS
from hf_actcompress.cli.common import Exit
from hf_actcompress.memory.planning.options import OPTIONS
from hf_actcompress.quick.preset_lines import PLAN_OPTIONS, PRESET_LINES
from hf_actcompress.versions import version_of
from tests.cli.conftest import CONFIG
from tests.cli.invoke import run


def test_the_version() -> None:
    result = run("--version")
    assert result.exit_code == Exit.OK and result.stdout == f"hf-actcompress {version_of('hf-actcompress')}\n"


def test_a_line_for_each_preset_says_whether_it_is_exact() -> None:
    assert list(PRESET_LINES) == list(PRESETS) and PLAN_OPTIONS == OPTIONS
    for name, line in PRESET_LINES.items():
        assert line.startswith("exact: " if PRESETS[name].lossless else "lossy: "), name
    lines = run("presets").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(PRESETS) and max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("estimate", "none.json"), "no such file or folder: none.json"),
        (("estimate", "a/b/c"), "no such file or folder: a/b/c"),
        (("plan", "adapter"), "is a PEFT adapter and no model: give the base model, 'some/base', and --lora"),
        (("estimate", "tiny.json", "--preset", "exat"), "unknown preset 'exat'"),
        (("report", "tiny.json", "--preset", "exat"), "unknown preset 'exat'"),
        (("plan", "tiny.json", "--allow", "itn8"), "unknown option of a plan 'itn8'"),
        (("plan", "tiny.json", "--objective", "fast"), "unknown objective 'fast'"),
        (("estimate", "tiny.json", "--dtype", "bf17"), "unknown dtype 'bf17'"),
        (("plan", "tiny.json", "--dtype", "bf17"), "unknown dtype 'bf17'"),
        (("report", "tiny.json", "--dtype", "bf17"), "unknown dtype 'bf17'"),
        (("estimate", "tiny.json", "--gpu", "rtx409"), "rtx4090"),
        (("estimate", "tiny.json", "--frames", "5"), "--frames is for a model of diffusers"),
        (("estimate", "flux.json", "--seq-len", "5"), "--seq-len is for models of transformers"),
        (("estimate", "scheduler.json"), "DDPMScheduler is no class of diffusers that estimates are made for; known: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_typo_is_answered_without_torch(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG))
    for name, kind in (("flux", "FluxTransformer2DModel"), ("scheduler", "DDPMScheduler")):
        (tmp_path / f"{name}.json").write_text(json.dumps({"_class_name": kind}))
    (tmp_path / "adapter").mkdir()
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "some/base"}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(adapter))
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom hf_actcompress.cli import app\n"
        f"result = CliRunner().invoke(app, {list(arguments)!r})\n"
        "assert not {'torch', 'transformers', 'diffusers'} & set(sys.modules)\n"
        "print(result.stderr)\nsys.exit(result.exit_code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert said in done.stdout and done.returncode in (Exit.USAGE, Exit.NO_MODEL), done.stderr


def test_without_a_connection_the_message_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for command in (("estimate", "--quick"), ("estimate",), ("plan",), ("report",)):
        result = run(command[0], "someone/some-model", *command[1:])
        assert result.exit_code == Exit.NO_MODEL, result.output
        assert "the hub does not answer" in result.stderr and result.stderr.endswith("a folder that has it\n")
