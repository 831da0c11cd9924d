"""The benchmark of the kernels: every kernel has a line, what is wrong has no figure, what is right has them all."""

import argparse
import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hf_actcompress.kernels import KERNELS

pytest.importorskip("triton")
RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(RECIPES))
    return importlib.import_module("benchmark_kernels")


def test_every_kernel_is_in_the_table_and_right(benchmark: ModuleType, tmp_path: Path) -> None:
    assert benchmark.main(["--quick", "--out", str(tmp_path)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "kernels.jsonl").read_text().splitlines()]
    assert {row["kernel"] for row in rows} == set(KERNELS)
    # the interpreter's times are not the kernels'
    assert all(row["correct"] and row["ms"] is None and row["of_copy"] is None for row in rows)
    assert "no speeds" in (tmp_path / "kernels.md").read_text()


def quick(benchmark: ModuleType, name: str) -> tuple[object, torch.device, argparse.Namespace]:
    case = next(case for case in benchmark.CASES if case.name == name)
    return case, torch.device("cpu"), benchmark.parse_args(["--quick"])


def test_figures(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.5, 2.0])
    monkeypatch.setattr(benchmark, "milliseconds", lambda run: (run(), next(times))[1])
    result = benchmark.measure(*quick(benchmark, "rms_norm_rebuild"), copy=1.0)
    # x and y [8, 128] and the gain in bf16, rstd in fp32
    moved = 2 * 8 * 128 * 2 + 128 * 2 + 8 * 4
    assert result.correct and result.moved_mib == moved / 2**20
    assert (result.ms, result.reference_ms) == (0.5, 2.0)
    assert result.gib_per_second == pytest.approx(moved / 2**30 / 0.5e-3) and result.of_copy == result.gib_per_second
    about = benchmark.environment(*quick(benchmark, "rms_norm_rebuild")[1:], 1.0, "command")
    assert "| 0.500 |" in benchmark.markdown([result], about) and "| 4.00 |" in benchmark.markdown([result], about)


def test_what_is_wrong_has_no_figure(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = benchmark.kernels

    def wrong(name: str) -> object:
        return (lambda *args: 1.1 * right(name)(*args)) if name == "rms_norm_rebuild" else right(name)

    monkeypatch.setattr(benchmark, "kernels", wrong)
    result = benchmark.measure(*quick(benchmark, "rms_norm_rebuild"), copy=1.0)
    assert not result.correct and result.ms is None and result.reference_ms is None
    assert benchmark.main(["--quick", "--names", "rms_norm_rebuild", "rms_norm_bwd", "--out", str(tmp_path)]) == 1
    assert "NO" in (tmp_path / "kernels.md").read_text()


def test_what_auto_should_run(benchmark: ModuleType) -> None:
    times = {"pooled_grad_weight": (1.0, 2.0), "row_sample_grad_weight": (2.0, 1.0), "rms_norm_bwd": (3.0, 1.0)}
    results = [
        benchmark.Result(name, "a", True, 1.0, ms=ours, reference_ms=stock) for name, (ours, stock) in times.items()
    ]
    about = benchmark.environment(torch.device("cpu"), benchmark.parse_args([]), 1.0, "command")
    said = benchmark.markdown(results, about).splitlines()
    assert "On request only, and faster than the reference: pooled_grad_weight (a)." in said
    assert "Run by `auto`, and slower than the reference: rms_norm_bwd (a)." in said


def test_on_request_or_not(benchmark: ModuleType) -> None:
    apart = [set(benchmark.parse_args([option]).names) for option in ("--on-request", "--automatic")]
    assert all(apart) and not set.intersection(*apart) and set.union(*apart) == set(KERNELS)
    with pytest.raises(SystemExit):
        benchmark.parse_args(["--names", "rms_norm_bwd", "--on-request"])
