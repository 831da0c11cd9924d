"""The public names: documented, and those of the README; its code runs."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers

import hf_actcompress
from hf_actcompress import PRESETS
from hf_actcompress.ops import OPS

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
NAMES = {
    "GradientNorms",
    "plan",
    "max_seq_len",
    "max_batch_size",
    "Plan",
    "log_memory",
    "MemoryCallback",
    "memory_timeline",
    "estimate",
    "MemoryTimeline",
    "Estimate",
    "BatchSizeReport",
    "find_batch_size",
    "Calibration",
    "calibrate",
    "PRESETS",
    "ActCompressCallback",
    "ActCompressError",
    "CompressionConfig",
    "FidelityComparison",
    "FidelityReport",
    "MemoryReport",
    "PatchReport",
    "StepMemory",
    "compare_presets",
    "fidelity_report",
    "kept_bytes",
    "measure_step",
    "memory_report",
    "patch_model",
    "patch_report",
    "patched",
    "unpatch_model",
}


def test_all_is_what_is_documented():
    assert set(hf_actcompress.__all__) == NAMES
    assert len(hf_actcompress.__all__) == len(NAMES)
    assert set(dir(hf_actcompress)) >= NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_public_object_is_documented(name):
    value = getattr(hf_actcompress, name)
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return
    assert inspect.getdoc(value)
    if inspect.isclass(value):
        for method, function in vars(value).items():
            if method.startswith("_") or not (inspect.isfunction(function) or isinstance(function, property)):
                continue
            # a one-word property says it all by its name and type; what does something says what
            assert isinstance(function, property) or inspect.getdoc(getattr(value, method)) or method.startswith("to_")


def test_functions_name_their_arguments():
    for name in ("patch_model", "memory_report", "measure_step"):
        doc = inspect.getdoc(getattr(hf_actcompress, name))
        for parameter in inspect.signature(getattr(hf_actcompress, name)).parameters:
            assert re.search(rf"^ *(\w+, )*{parameter}(, \w+)*:", doc, re.M), f"{name}: {parameter}"


def test_unknown_name_lists_the_known():
    with pytest.raises(AttributeError, match="patch_model"):
        hf_actcompress.nothing_of_this_name  # noqa: B018


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S) if README.exists() else []


@pytest.mark.skipif(not README.exists(), reason="no README.md yet")
def test_readme_code_runs(monkeypatch):
    """All blocks in order, in one namespace, on a tiny model in place of a download; the Trainer does one step."""
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 32}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    ids = torch.arange(8)[None]
    batch = {"input_ids": ids, "labels": ids}

    def train(trainer):
        trainer.model(**batch).loss.backward()

    def from_pretrained(*_, **__):
        return transformers.GPT2LMHeadModel(config)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.setattr(transformers.Trainer, "train", train)
    namespace = {"batch": batch}
    assert blocks()
    for index, code in enumerate(blocks()):
        # an ellipsis among the arguments stands for the reader's own
        exec(compile(code.replace(", ...)", ")"), f"README.md block {index}", "exec"), namespace)


@pytest.mark.parametrize("op", OPS, ids=lambda op: f"{op.name}-{op.variant}")
def test_readme_lists_every_op(op):
    row = f"| {op.name} | {op.variant} | {op.keeps} | {op.rebuilds} | {op.gradient} |"
    assert row in README.read_text().splitlines()


@pytest.mark.parametrize("preset", PRESETS)
def test_readme_names_every_preset(preset):
    assert f"`{preset}`" in README.read_text() or f"| {preset} |" in README.read_text()
