"""The public names are documented."""

from __future__ import annotations

import importlib.metadata
import inspect
import re

import pytest

import hf_actcompress

NAMES = {
    "GradientNorms",
    "plan",
    "max_seq_len",
    "max_batch_size",
    "Plan",
    "MemoryCallback",
    "memory_timeline",
    "estimate",
    "MemoryTimeline",
    "Estimate",
    "BatchSizeReport",
    "find_batch_size",
    "longest_batches",
    "Calibration",
    "calibrate",
    "PRESETS",
    "PRESET_LINES",
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
            # a property's name and type are enough; a method needs a docstring
            assert isinstance(function, property) or inspect.getdoc(getattr(value, method)) or method.startswith("to_")


def test_functions_name_their_arguments():
    for name in ("patch_model", "memory_report", "measure_step"):
        doc = inspect.getdoc(getattr(hf_actcompress, name))
        for parameter in inspect.signature(getattr(hf_actcompress, name)).parameters:
            assert re.search(rf"^ *(\w+, )*{parameter}(, \w+)*:", doc, re.M), f"{name}: {parameter}"


def test_the_version_is_that_of_the_installation(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"that of {name}")
    assert hf_actcompress.__version__ == "that of hf-actcompress"


def test_unknown_name_lists_the_known():
    with pytest.raises(AttributeError, match="patch_model"):
        hf_actcompress.nothing_of_this_name  # noqa: B018
