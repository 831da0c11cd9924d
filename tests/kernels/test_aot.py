"""Every kernel compiled ahead of time for every generation of GPU, by the recipe that writes the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hf_actcompress.kernels import KERNELS

pytest.importorskip("triton")

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "recipes" / "results" / "aot"
# KiB of shared memory that a block may have
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
CAPABILITIES = set(SHARED)
# what moves whole tensors and little else: an access of 16 bytes per thread for all but statistics and partial sums
STREAMING = [
    name
    for name, module in KERNELS.items()
    if module in {"activation", "activation_forward", "gated_mlp", "rms_norm", "layer_norm", "rope"}
]
# compiled for the widths that models have
NORMS = {"rms_norm", "layer_norm", "norm_output"}
# the same where groups or outputs are many and even; odd ones begin anywhere
GROUPED = [
    name
    for name, module in KERNELS.items()
    if module in {"int_group", "float8", "linear", "pooled", "row_sample", "block_sparse"}
]


def compiled(out: Path, *options: str) -> list[dict[str, Any]]:
    # in a process of its own: this one has triton as an interpreter
    command = [sys.executable, str(ROOT / "recipes" / "compile_kernels.py"), "--out", str(out), "--jobs", "1", *options]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads((out / "kernels.json").read_text())["kernels"]


def check(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["spilled_bytes"] == 0 and row["shared_bytes"] <= 1024 * SHARED[row["capability"]], row
        if row["name"] in STREAMING:
            # of narrow rows, a tile of which is one access, the statistics are a larger share
            assert row["wide"] > 0.88, row
        if row["name"] in GROUPED:
            assert row["widest"] > 0.8, row


def test_every_kernel_for_one_generation(tmp_path: Path) -> None:
    rows = compiled(tmp_path, "--capability", "90", "--dtype", "bfloat16", "--samples", "2", "--width", "4096")
    assert {row["name"] for row in rows} == set(KERNELS)
    check(rows)


def test_norms_of_wide_rows(tmp_path: Path) -> None:
    options = ("--capability", "120", "--dtype", "float32", "--samples", "1", "--width", "8192", "16384")
    check(compiled(tmp_path, *options, "--name", "layer_norm_output_bwd", "layer_norm_bwd"))


def test_some_kernels_for_the_others(tmp_path: Path) -> None:
    others = [str(c) for c in CAPABILITIES - {90}]
    names = ["layer_norm_bwd", "gated_product_bwd", "int_group_pack", "int_group_grad_weight", "rope_fwd"]
    options = ("--dtype", "float32", "--samples", "1", "--width", "768", "--name", *names)
    rows = compiled(tmp_path, "--capability", *others, *options)
    assert {(row["name"], row["capability"]) for row in rows} == set(product(names, map(int, others)))
    check(rows)


def test_committed_table_is_of_these_kernels() -> None:
    rows = json.loads((RESULTS / "kernels.json").read_text())["kernels"]
    assert {(row["name"], row["capability"]) for row in rows} == set(product(KERNELS, CAPABILITIES))
    norms = [row["widths"] for row in rows if KERNELS[row["name"]] in NORMS]
    assert norms and all({768, 1024, 2048, 3072, 4096, 5120, 8192, 12288, 16384} == set(widths) for widths in norms)
    check(rows)
