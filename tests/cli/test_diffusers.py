"""`estimate` for models of diffusers: rows, words, and what is said of options that are for other models."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_actcompress.cli.common import Exit
from hf_actcompress.cli.estimate_text import recommendation
from hf_actcompress.cli.latents import rows_for
from hf_actcompress.memory import estimate
from hf_actcompress.quick.diffusion import latents_of
from hf_actcompress.quick.strategies import STRATEGIES
from tests.cli.conftest import CONFIG
from tests.cli.invoke import run, unwrapped

FLUX = {
    "_class_name": "FluxTransformer2DModel", "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
    "num_attention_heads": 4, "axes_dims_rope": [4, 6, 6], "in_channels": 16, "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
}  # fmt: skip
SIZES = ("--height", "64", "--width", "128", "--text-tokens", "8")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder of a pipeline."""
    monkeypatch.setenv("ACTCOMPRESS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "pipeline/transformer").mkdir(parents=True)
    (tmp_path / "pipeline/transformer/config.json").write_text(json.dumps(FLUX))
    return str(tmp_path / "pipeline")


def test_a_table(model: str) -> None:
    pytest.importorskip("diffusers")
    asked = ("estimate", model, *SIZES, "--lora", "--preset", "exact", "--dtype", "bf16")
    result = run(*asked)
    assert result.exit_code == Exit.OK, result.output
    said = unwrapped(result.stdout)
    for part in (
        "batch 1 x 64 x 128 pixels, 8 text tokens, weights bfloat16", "to_q, to_k, to_v, to_out.0 by add_adapter",
        "a sample is 32 latents", "the VAE and the text encoders are not on the card", "evaluation with this batch: ",
        "mean squared error of the prediction", 'patch_model(model, "exact")',
    ):  # fmt: skip
        assert part in said, part
    data = json.loads(run(*asked, "--json").stdout)
    options: dict[str, Any] = {"height": 64, "width": 128, "text_tokens": 8, "lora": True, "dtype": "bfloat16"}
    for row, preset in zip(data["rows"], (None, "exact"), strict=True):
        assert row["kept_bytes"] == estimate(model, batch_size=1, config=preset, **options).kept_bytes
    # an answer from the cache, which other sizes are not
    again = run(*asked)
    assert again.stdout == result.stdout and "1 of 2" not in again.stderr and "1 of 2" in result.stderr
    assert run(*asked, "--height", "128").stdout != result.stdout


def test_rows_that_differ_and_the_code_of_diffusers() -> None:
    latents = latents_of("FluxTransformer2DModel", {})
    names = [row.name for row in rows_for((), latents)]
    assert names == ["stock", "checkpointing", "exact", "exact + checkpointing", "int8", "int4", "offload"]
    assert {row.name for row in rows_for((), None)} > {*names} and rows_for(["long"], latents)[1].name == "long"
    for diffusion, code in ((True, "model.enable_gradient_checkpointing()"), (False, "model.gradient_check")):
        advised = recommendation("checkpointing", STRATEGIES["checkpointing"], diffusion=diffusion)
        assert code in "".join(advised)


REFUSED = {
    "--seq-len 4": "--seq-len is for models of transformers", "--quick": "--quick is for", "--qlora": "--qlora is for",
    "--max-context --gpu 24": "--max-context is for", "--trl": "--trl is for", "--fsdp 2": "--fsdp is for",
    "--quantization nf4": "--quantization is for", "--target-len 3": "--target-len is for",
    "--engine compile": "--engine is for", "--frames 5": "one frame; got frames=5",
    "--height 1000": "height=1000 is no multiple of 16",
}  # fmt: skip


@pytest.mark.parametrize("options", REFUSED)
def test_options_of_other_models(options: str, model: str) -> None:
    result = run("estimate", model, *options.split())
    assert result.exit_code in (Exit.USAGE, Exit.NO_MODEL) and REFUSED[options] in result.stderr, result.output
    assert re.fullmatch("error: [^\n]+\n", result.stderr), result.stderr


@pytest.mark.parametrize("option", ["--height", "--width", "--frames", "--text-tokens"])
@pytest.mark.parametrize("quick", [(), ("--quick",)])
def test_options_of_diffusers(option: str, quick: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "llama.json").write_text(json.dumps(CONFIG))
    result = run("estimate", str(tmp_path / "llama.json"), option, "32", *quick)
    assert result.exit_code == Exit.USAGE and f"{option} is for a model of diffusers" in result.stderr


def test_without_diffusers(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    result = run("estimate", model)
    assert result.exit_code == Exit.MISSING, result.output
    assert result.stderr.splitlines()[-1] == (
        "error: FluxTransformer2DModel needs diffusers, which is not installed: pip install diffusers"
    )


@pytest.mark.parametrize("command", [("plan", "--gpu", "24"), ("report",)])
def test_other_commands(command: tuple[str, ...], model: str) -> None:
    result = run(command[0], model, *command[1:])
    assert result.exit_code == Exit.NO_MODEL and "is of diffusers, whose models `estimate` takes" in result.stderr
