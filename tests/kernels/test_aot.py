"""The recipe that writes the table compiles kernels ahead of time for generations of GPUs; the builds are checked."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_actcompress.kernels import KERNELS
from hf_actcompress.kernels.launch import CachedLaunches
from tests.kernels.harness import samples

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpretedFunction  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from hf_actcompress.kernels.common import POINTWISE_TILE  # noqa: E402

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "recipes" / "results" / "aot"
# KiB of shared memory that a block may have
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
CAPABILITIES = set(SHARED)
# these kernels move whole tensors: a thread accesses 16 bytes at a time, except for statistics and partial sums
STREAMING = [
    name
    for name, module in KERNELS.items()
    if module
    in {
        "kernels.activation",
        "kernels.activation_forward",
        "kernels.gated_mlp",
        "kernels.rms_norm",
        "kernels.layer_norm",
        "kernels.rope",
    }
]
# the most instructions per element of 16 bits: a data center GPU has time for about 10 for each byte that it moves.
# Codes take 45 at most, except where rows are narrower than a tile: each element then needs a division to find its row
INSTRUCTIONS = {"activation_output_bits": 45, "activation_output_bwd": 45, "fewbit_bwd": 45, "fewbit_codes": 53}
# modules whose kernels depend on the width: they are compiled for the widths of models
BY_WIDTH = {
    "kernels.layer_norm", "kernels.rms_norm", "kernels.rope", "kernels.float8", "kernels.int_group",
    "kernels.linear_cross_entropy", "methods.norm_output.kernel", "methods.fewbit.kernel",
}  # fmt: skip
WIDTHS = (768, 1024, 2048, 3072, 4096, 5120, 8192, 12288, 16384)
# these kernels access 16 bytes at a time if groups or outputs are many and even; odd ones may begin at any address
GROUPED = [
    name
    for name, module in KERNELS.items()
    if module
    in {
        "kernels.int_group",
        "kernels.float8",
        "kernels.grad_weight",
        "methods.pooled.kernel",
        "methods.row_sample.kernel",
        "methods.block_sparse.kernel",
    }
]


def compiled(out: Path, *options: str) -> list[dict[str, Any]]:
    # in another process, because this one may use Triton's interpreter
    command = [sys.executable, str(ROOT / "recipes" / "compile_kernels.py"), "--out", str(out), "--jobs", "1", *options]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads((out / "kernels.json").read_text())["kernels"]


def check(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["spilled_bytes"] == 0 and row["shared_bytes"] <= 1024 * SHARED[row["capability"]], row
        if row["name"] in STREAMING:
            # if rows are narrow, a tile is one access, and statistics are a larger share of all accesses
            assert row["wide"] > 0.88, row
        if row["name"] in INSTRUCTIONS and row["dtype"] != "float32":
            assert row["instructions"] * 32 * row["warps"] <= INSTRUCTIONS[row["name"]] * POINTWISE_TILE, row
        if row["name"] in GROUPED:
            assert row["widest"] > 0.8, row


@pytest.mark.daily(3)
def test_every_kernel_for_one_generation(tmp_path: Path) -> None:
    rows = compiled(tmp_path, "--capability", "90", "--dtype", "bfloat16", "--samples", "2", "--width", "4096")
    assert {row["name"] for row in rows} == set(KERNELS)
    check(rows)


def test_norms_of_wide_rows(tmp_path: Path) -> None:
    options = ("--capability", "120", "--dtype", "float32", "--samples", "1", "--width", "8192", "16384")
    check(compiled(tmp_path, *options, "--name", "layer_norm_output_bwd", "layer_norm_bwd"))


@pytest.mark.daily(2)
def test_some_kernels_for_the_others(tmp_path: Path) -> None:
    others = [str(c) for c in CAPABILITIES - {90}]
    names = ["layer_norm_bwd", "gated_product_bwd", "int_group_pack", "int_group_grad_weight", "rope_fwd"]
    options = ("--dtype", "float32", "--samples", "1", "--width", "768", "--name", *names)
    rows = compiled(tmp_path, "--capability", *others, *options)
    assert {(row["name"], row["capability"]) for row in rows} == set(product(names, map(int, others)))
    check(rows)


def test_gradient_from_the_output_in_half_precision(tmp_path: Path) -> None:
    options = ("--capability", "80", "90", "--dtype", "float16", "--name", "activation_output_bwd", "--samples", "1")
    rows = compiled(tmp_path, *options)
    assert len(rows) == 2
    check(rows)


@pytest.mark.parametrize("name", KERNELS)
def test_blocks_depend_on_widths_where_the_table_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are recorded, and do not run."""
    module = importlib.import_module(f"hf_actcompress.{KERNELS[name]}")
    # kernels do not run here, so the results of probes would be wrong; they must not be remembered
    monkeypatch.setattr(module, "_repeats", {}, raising=False)
    if hasattr(module, "shown_form"):
        form = lambda _, kind, dtype, *rest: module.Form(*module.FORMS[kind][0], dtype, dtype)  # noqa: E731
        monkeypatch.setattr(module, "shown_form", form)
    found: set[tuple[Any, ...]] = set()

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.add((kernel.__name__, *(f"{key} {x}" for key, x in sorted(options.items()) if not isinstance(x, Tensor))))

    for kind in (JITFunction, InterpretedFunction):
        monkeypatch.setattr(kind, "run", note)
    blocks = []
    for width in WIDTHS:
        torch.manual_seed(0)
        found.clear()
        for args in samples(name, torch.bfloat16, 2, width):
            getattr(module, name)(*args)
        blocks.append(frozenset(found))
    assert (len(set(blocks)) > 1) == (KERNELS[name] in BY_WIDTH)


def kernel_options() -> dict[str, list[set[str]]]:
    """For each kernel name, the compile-time options of the kernels that have it."""
    found: dict[str, list[set[str]]] = defaultdict(list)
    for module in sorted(set(KERNELS.values())):
        for name, x in vars(importlib.import_module(f"hf_actcompress.{module}")).items():
            x = x.jit if isinstance(x, CachedLaunches) else x
            if isinstance(x, (JITFunction, InterpretedFunction)):
                found[name].append({option for option in inspect.signature(x.fn).parameters if option.isupper()})
    return found


def test_committed_table_is_of_these_kernels() -> None:
    rows = json.loads((RESULTS / "kernels.json").read_text())["kernels"]
    assert {(row["name"], row["capability"]) for row in rows} == set(product(KERNELS, CAPABILITIES))
    known = kernel_options()
    for row in rows:
        assert set(row["options"]) in known[row["kernel"]], f"{row['name']} was another kernel when it was compiled"
        assert row.get("widths") == (list(WIDTHS) if KERNELS[row["name"]] in BY_WIDTH else None), row
    check(rows)
