"""What `doctor` prints, and its exit codes. `tests/memory/test_check_up.py` tests what it finds."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from hf_actcompress.cli.common import Exit
from hf_actcompress.memory.fidelity import checkup
from hf_actcompress.memory.fidelity.checkup_report import CheckUp
from tests.cli.invoke import SIZES, run


def test_a_right_step(model):
    result = run("doctor", model, *SIZES, "--rounds", "1", "--device", "cpu", "--json")
    assert result.exit_code == Exit.OK, result.output
    data = json.loads(result.stdout)
    assert data["right"] and data["patched"] == "patched 2 layers, exact" and data["device"] == "cpu"
    stock, ours = data["figures"]
    assert ours["kept_bytes"] < stock["kept_bytes"] and "weights bfloat16, no autocast" in data["assumed"]
    # another run has the same weights and tokens
    again = json.loads(run("doctor", model, *SIZES, "--rounds", "1", "--device", "cpu", "--json").stdout)
    assert again["stock_loss"] == data["stock_loss"]


@pytest.fixture
def asked(monkeypatch):
    """The arguments of the check-up, which answers at once; its faults can be set."""
    found = CheckUp("exact", True, "cpu", "patched 2 layers, exact", 1.0, 1.0, 4, 4, 0.0, 0.1, None, None, (), ())
    seen = {"faults": ()}

    def check_up(model, batch, config, **options):
        seen.update(options, config=config, model=model, batch=batch)
        figures = (checkup.StepFigures(200, 300, 0.1), checkup.StepFigures(100, 150, 0.1))
        return dataclasses.replace(found, figures=figures, faults=seen["faults"])

    monkeypatch.setattr(checkup, "check_up", check_up)
    return seen


def test_what_is_asked(model, asked):
    result = run("doctor", model, *SIZES, "--preset", "int8", "--bf16", "--lora-rank", "2", "--layers", "1")
    assert result.exit_code == Exit.OK, result.output
    assert asked["config"] == "int8" and asked["autocast"] == torch.bfloat16 and asked["rounds"] == 5
    assert asked["batch"]["input_ids"].shape == (2, 16) and asked["room"] > 0
    names = [name for name, p in asked["model"].named_parameters() if p.requires_grad]
    assert any("lora_A" in name for name in names) and not any(".layers.1." in name for name in names)
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "verdict: equal, bit by bit" in result.stdout and result.stderr == f"checking {model}\n"


def test_a_wrong_step_exits_with_1_and_gives_no_model_card(model, asked):
    card = run("doctor", model, *SIZES, "--model-card")
    assert card.exit_code == Exit.OK and card.stdout.startswith("### Training memory\n")
    assert "batch 2 x 16 without padding" in card.stdout
    asked["faults"] = ("the loss is another one",)
    result = run("doctor", model, *SIZES, "--model-card")
    assert result.exit_code == Exit.NOT_RIGHT == 1
    assert "verdict: NOT RIGHT: the loss is another one" in result.stdout and "###" not in result.stdout


@pytest.mark.parametrize(
    "options, message",
    [(("--device", "tpu"), "unknown device 'tpu'"), (("--preset", "int9"), "unknown preset"), (("--rounds", "0"), "1")],
)
def test_what_it_refuses(model, options, message):
    result = run("doctor", model, *options)
    assert result.exit_code == Exit.USAGE and message in result.stderr and result.stdout == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_card_that_is_not_there(model):
    result = run("doctor", model, "--device", "cuda")
    assert result.exit_code == Exit.USAGE and "torch finds no CUDA device" in result.stderr
