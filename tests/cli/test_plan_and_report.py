"""What plan and report print, write and refuse."""

from __future__ import annotations

import json
import os
import re
import textwrap
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM

from hf_actcompress import patch_report
from hf_actcompress.cli.common import Exit
from hf_actcompress.memory import Plan, estimate
from hf_actcompress.memory.planning import plans
from tests.cli.invoke import SIZES, run

ROOT = Path(__file__).parents[2]


def test_plan_is_printed_written_and_taken_by_the_library(model, tmp_path):
    exact = estimate(model, batch_size=8, seq_len=128).device_bytes
    page, out = tmp_path / "page.html", tmp_path / "plan.json"
    options = ("--batch-size", "8", "--seq-len", "128", "--gpu", f"{exact - 10_000}B")
    options += ("--allow", "checkpoint", "--headroom", "0")
    result = run("plan", model, *options, "--html", str(page), "--out", str(out))
    assert result.exit_code == Exit.OK, result.output
    assert "checkpoint" in result.stdout and "gradients exact" in result.stdout and "\x1b" not in result.stdout
    found = Plan.from_json(out.read_text())
    assert found.config.checkpoint and found.estimate.device_bytes <= exact - 10_000
    text = page.read_text()
    assert f"wrote {out}" in result.stderr and f"wrote {page}" in result.stderr
    assert f"Plan.from_json(Path({str(out)!r}).read_text())" in result.stdout
    assert "checkpoint: the layer runs again in backward" in result.stdout
    # the code below the plan, with a model of that kind
    code = textwrap.dedent(result.stdout.partition("to train with it:\n")[2])
    patched = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    exec(code, {"model": patched})
    assert {row.role for row in patch_report(patched).patched} & {"checkpoint"}
    assert "<img" not in text and 'class="mark"' in text and "the budget" in text and "model.layers.1" in text


def test_the_code_of_a_plan_that_is_not_written_asks_for_the_same(model):
    exact = estimate(model, batch_size=8, seq_len=128, optimizer="adamw_8bit").device_bytes
    options = ("--batch-size", "8", "--seq-len", "128", "--gpu", f"{exact - 10_000}B", "--optim", "adamw_8bit")
    result = run("plan", model, *options, "--allow", "checkpoint", "--headroom", "0")
    assert result.exit_code == Exit.OK, result.output
    (code,) = (line.strip() for line in result.stdout.splitlines() if "plan(model, " in line)
    asked = f"allow=('checkpoint',), headroom=0.0, budget={exact - 10_000}, optimizer='adamw_8bit', engine='eager'"
    assert code == f"patch_model(model, plan(model, batch_size=8, seq_len=128, {asked}))"


def test_the_command_of_the_readme_finds_an_exact_plan(monkeypatch):
    """The test runs the README's command on a config file of the checkout, because that one needs no network."""
    text = (ROOT / "hf_actcompress/memory/README.md").read_text()
    (command,) = re.findall(r"^hf-actcompress (plan recipes/.*)$", text, flags=re.MULTILINE)
    monkeypatch.chdir(ROOT)
    result = run(*command.split(), "--json")
    assert result.exit_code == Exit.OK, result.output
    found = Plan.from_json(result.stdout)
    assert found.error == 0 and found.config.lossless
    assert found.estimate.device_bytes <= 0.92 * found.budget_bytes


def test_plan_that_does_not_fit(model, monkeypatch):
    from hf_actcompress.errors import DoesNotFitError

    def refuse(model, **options):
        assert options["budget"] == 2**20 and options["objective"] == "fidelity" and "allow" not in options
        raise DoesNotFitError("a batch of 3 would fit", 5, 3, 0)

    monkeypatch.setattr(plans, "plan", refuse)
    arguments = "plan", model, "--gpu", "1MiB", "--objective", "fidelity"
    result = run(*arguments)
    assert result.exit_code == Exit.DOES_NOT_FIT
    assert result.stderr == f"planning {model}\nerror: a batch of 3 would fit\n"
    changes = [line.split(":")[0] for line in result.stdout.splitlines()]
    assert "  LoRA (--lora), exact + checkpointing" in changes and "  QLoRA (--qlora), exact + checkpointing" in changes
    result = run(*arguments, "--json")
    assert result.exit_code == Exit.DOES_NOT_FIT and result.stdout == ""


def test_report_measures_per_module(model, tmp_path):
    page = tmp_path / "page.html"
    result = run("report", model, *SIZES, "--json", "--html", str(page))
    assert result.exit_code == Exit.OK, result.output
    assert result.stderr == f"measuring {model}\nwrote {page}\n"
    data = json.loads(result.stdout)
    modules = {row["module"] for row in data["rows"]}
    assert {"model.layers.0.mlp", "model.layers.1.self_attn"} <= modules
    assert 0 < data["patched_bytes"] < data["stock_bytes"]
    assert "memory over time" in page.read_text()


def test_report_of_fewer_layers_and_with_adapters(model):
    one = json.loads(run("report", model, *SIZES, "--json", "--layers", "1", "--lora").stdout)
    assert any(".0." in row["module"] and "lora_A" in row["module"] for row in one["rows"])
    assert not any(".layers.1." in row["module"] for row in one["rows"])


def test_report_of_an_encoder_and_of_too_long_a_sequence(tmp_path):
    path = tmp_path / "bert.json"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"architectures": ["BertForSequenceClassification"], "model_type": "bert", "vocab_size": 64, **sizes}
    path.write_text(json.dumps({**config, "max_position_embeddings": 32}))
    assert run("report", str(path), *SIZES).exit_code == Exit.OK
    result = run("report", str(path), "--seq-len", "33")
    assert result.exit_code == Exit.NO_MODEL and "32 positions" in result.stderr


def test_report_refuses_what_the_machine_cannot_hold(model, monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    result = run("report", model, *SIZES)
    assert result.exit_code == Exit.NO_MODEL and "--layers" in result.stderr
    assert run("report", model, *SIZES, "--layers", "1").exit_code == Exit.OK
