"""Every command says what its figures depend on, in one line or one field."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from hf_actcompress.cli.assumptions import assumed
from hf_actcompress.cli.common import Exit
from hf_actcompress.memory.planning import plans
from tests.cli.conftest import CONFIG
from tests.cli.invoke import SIZES, run, unwrapped

SAID = ("batch 2 x 16 without padding", "weights bfloat16", "no autocast", "engine eager", "the model's own loss")
TRAINED = ("LoRA of rank 1", "adamw", "fused attention")
COMMANDS = {
    "formula": ("estimate", "--quick", "--lora-r", "1"),
    "estimate": ("estimate", "--preset", "exact", "--lora-r", "1"),
    "plan": ("plan", "--gpu", "24", "--allow", "checkpoint", "--dtype", "bfloat16", "--lora-r", "1"),
    "report": ("report", "--layers", "1", "--lora-r", "1"),
}


def answer(model: str, command: tuple[str, ...], *more: str) -> str:
    result = run(command[0], model, *SIZES, *command[1:], *more)
    assert result.exit_code == Exit.OK, result.output
    return result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_assumes(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "num_attention_heads": 2, "num_key_value_heads": 2}))
    # text and JSON show the same plan, which is made once
    monkeypatch.setattr(plans, "plan", functools.cache(plans.plan))
    text = unwrapped(answer(str(path), COMMANDS[name]))
    (line,) = (found for found in text.splitlines() if found.startswith("assumed: "))
    for said in (*SAID, "LoRA of rank 1", "a CPU's attention") if name == "report" else (*SAID, *TRAINED):
        assert said in line, line
    assert ("--trl" in line) == (name in ("formula", "estimate"))
    if name == "estimate":
        # the JSON of whole estimates is compared in test_memory_commands.py
        return
    assert f"assumed: {json.loads(answer(str(path), COMMANDS[name], '--json'))['assumed']}" == line


def test_what_the_line_says_of_each_option() -> None:
    """Without any estimate."""
    options: dict[str, Any] = {"optimizer": "sgd", "device": "cpu", "dtype": None}

    def line(**more: Any) -> str:
        return assumed({**options, **more}, 4, 128, ["float32"])

    assert line() == (
        "batch 4 x 128 without padding, weights float32, no autocast, all weights trained, sgd, engine eager, the "
        "model's own loss, a CPU's attention"
    )
    said = {
        "labels of 9": {"target_len": 9},
        "with nf4": {"quantization": "nf4"},
        "autocast bfloat16": {"autocast": "bfloat16"},
        "LoRA of rank 8": {"lora": True},
        "engine compile": {"engine": "compile"},
        "TRL's fused head": {"trl": True},
        "one of 8 processes under FSDP2": {"fsdp": 8},
        "one of 8 under ZeRO-3": {"zero": 3, "processes": 8},
        "one of 8 under DDP": {"processes": 8},
        "CUDA's fused attention": {"device": "cuda"},
    }
    for words, more in said.items():
        assert words in line(**more) and words not in line()


def test_assumptions_about_adapters_and_optimizers(model: str) -> None:
    """The rank that peft takes if none is given, and where the states of a paged optimizer are."""
    peft = pytest.importorskip("peft")
    for command in (("estimate", "--quick"), ("estimate", "--preset", "exact"), ("plan", "--gpu", "24")):
        output = unwrapped(run(command[0], model, *SIZES, "--lora", "--optim", "paged_adamw_8bit", *command[1:]).stdout)
        assert f'LoRA of rank {peft.LoraConfig().r} on peft\'s "all-linear"' in output, (command, output)
        assert "paged_adamw_8bit with all of its states on the card" in output, (command, output)


def test_a_quantised_config_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 16}
    path.write_text(json.dumps({**CONFIG, "quantization_config": gptq}))
    assert "with packed weights of 4 bits" in unwrapped(answer(str(path), ("estimate", "--preset", "exact", "--lora")))


def test_the_readme_shows_the_assumptions_of_its_command() -> None:
    root = Path(__file__).parents[2]
    (command,) = re.findall(r"^hf-actcompress (estimate recipes/.*)$", (root / "README.md").read_text(), re.MULTILINE)
    words = [str(root / word) if word.startswith("recipes/") else word for word in command.split()]
    shown = unwrapped((root / "recipes/results/readme/estimate.txt").read_text()).splitlines()
    printed = unwrapped(run(*words, "--preset", "exact").stdout).splitlines()
    assert [line for line in printed if line.startswith("assumed: ")][0] in shown
