"""The benchmark of the kernels: every kernel has a line, wrong results have no figures, correct ones have all."""

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
    assert "Timed by `auto`, and faster than the reference: pooled_grad_weight (a)." in said
    assert "Run by `auto`, and slower than the reference: rms_norm_bwd (a)." in said


def test_timed_or_not(benchmark: ModuleType) -> None:
    apart = [set(benchmark.parse_args([option]).names) for option in ("--timed", "--automatic")]
    assert all(apart) and not set.intersection(*apart) and set.union(*apart) == set(KERNELS)
    with pytest.raises(SystemExit):
        benchmark.parse_args(["--names", "rms_norm_bwd", "--timed"])


@pytest.fixture
def roofline(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(RECIPES))
    return importlib.import_module("common.roofline")


def test_roofline_by_hand(roofline: ModuleType) -> None:
    """A card with 1000 operations and 10 bytes a second; x [8, 4] has 4 bytes of codes and scales an element."""
    form, shape, card = roofline.Form(1.0, 4.0), roofline.Shape(8, 4, 2), roofline.Card(10.0, 1000.0)
    # the first pass reads codes and writes x, the second moves x, dy and dW; 2 * 8 * 4 * 2 operations take less time
    assert roofline.seconds(roofline.launches(form, shape)["dense"], card) == (128 + 64) / 10 + (64 + 32 + 16) / 10
    # the kernel moves codes, dy and dW
    assert roofline.seconds(roofline.launches(form, shape)["kernel"], card, 0.8) == (128 + 32 + 16) / 10
    assert roofline.must_win(form, shape, card)
    # 128 operations in the 30.4 seconds that the other way takes
    assert roofline.needed_rate(form, shape, card) == pytest.approx(128 / 1000 / 30.4)
    # half of the rows are gathered: those of dy are read and written; then those of x and dy are read, and dW is
    # written
    rows = roofline.launches(roofline.Form(0.5), shape)
    assert [w.bytes for w in rows["torch"]] == [16 + 16, 32 + 16 + 16] and rows["torch"][1].operations == 64
    assert [w.bytes for w in rows["kernel"]] == [32 + 16 + 16]
    # with tiles of 2 features, each of the two columns of tiles has its own rows of dy
    assert roofline.launches(roofline.Form(0.5, tile=2), shape)["kernel"][0].bytes == 32 + 32 + 16


def test_roofline_is_monotonic(roofline: ModuleType) -> None:
    """Fewer kept elements, fewer outputs and slower memory never ask for a faster product."""
    card, shape = roofline.CARDS["H100"], roofline.Shape(16384, 2048, 2048)
    by_share = [roofline.needed_rate(roofline.Form(share), shape, card) for share in (0.1, 0.3, 0.5, 0.9)]
    by_bits = [roofline.needed_rate(roofline.FORMS[name], shape, card) for name in ("int8", "int4", "int2")]
    outputs = [roofline.Shape(16384, 2048, o) for o in (256, 512, 2048, 8192)]
    by_outputs = [roofline.needed_rate(roofline.FORMS["int8"], shape, card) for shape in outputs]
    cards = [card._replace(bandwidth=bandwidth) for bandwidth in (1e12, 3e12, 9e12)]
    by_speed = [roofline.needed_rate(roofline.FORMS["int8"], shape, card) for card in cards]
    for rates in (by_share, by_outputs, by_speed):
        assert rates == sorted(rates) and rates[0] < rates[-1]
    # the pass that unpacks reads more bits in more time, which helps the kernel that does not need it
    assert by_bits == sorted(by_bits)
    for form in roofline.FORMS.values():
        wins = [roofline.must_win(form, shape, card, rate) for rate in (0.1, 0.5, 0.8, 1.0)]
        assert wins == sorted(wins)


def test_roofline_is_printed(benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["--roofline", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "roofline.md").read_text()
    assert text in capsys.readouterr().out and "| int4 | k, v | 16384, 2048, 512 |" in text
