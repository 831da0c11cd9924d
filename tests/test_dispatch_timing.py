"""Kernels that may be slower than the alternative: `auto` times both once for each shape, and runs the faster one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_actcompress import dispatch
from hf_actcompress.codecs import Float8, IntGroup
from hf_actcompress.dispatch import implementation, kernel_status, runs_kernel, use
from hf_actcompress.kernels import TIMED
from hf_actcompress.kernels.timing import Decisions
from hf_actcompress.methods.row_sample.reference import row_sample_grad_weight
from hf_actcompress.reference.table import FUNCTIONS


class _Clock:
    """Runs both ways once and reports times, in milliseconds, that the test chose."""

    def __init__(self, kernel: float, other: float) -> None:
        self.times, self.asked = (kernel, other), 0

    def __call__(self, ways: Any, device: torch.device) -> list[list[float]]:
        self.asked += 1
        for run in ways:
            run()
        return [[time, time, 100 * time] for time in self.times]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., _Clock]]:
    """Make `auto` behave as on a GPU. The fixture's function sets the times that the clock will report."""
    pytest.importorskip("triton")
    # launchers hold kernels, and the tests replace these
    dispatch._launcher.cache_clear()
    monkeypatch.setenv("HF_ACTCOMPRESS_TIMING", "1")
    monkeypatch.setattr(dispatch, "_takes", lambda *key: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def start(kernel: float, other: float, free: int = 1 << 40) -> _Clock:
        clock = _Clock(kernel, other)
        monkeypatch.setattr(dispatch, "_decisions", Decisions(clock, lambda device: free))
        return clock

    yield start
    dispatch._launcher.cache_clear()


def _rows(count: int = 12, outputs: int = 5) -> tuple[Tensor, ...]:
    return torch.randn(count, outputs), torch.randn(3, 8), torch.tensor([0, 2, 4], dtype=torch.int32)


@pytest.mark.parametrize(("kernel", "other", "wins"), [(1.0, 2.0, True), (2.0, 1.0, False), (0.99, 1.0, False)])
def test_the_faster_one_runs_and_is_timed_once(kernel, other, wins, timed, monkeypatch):
    clock, args, ran = timed(kernel, other), _rows(), []
    name = "row_sample_grad_weight"
    monkeypatch.setitem(dispatch._kernels, name, lambda *args: ran.append(args) or row_sample_grad_weight(*args))
    state = torch.get_rng_state()
    for _ in range(3):
        assert torch.equal(implementation(name, args[0])(*args), row_sample_grad_weight(*args))
    # the clock ran the kernel once
    assert clock.asked == 1 and len(ran) == 1 + 3 * wins
    assert torch.equal(torch.get_rng_state(), state)
    # 12 and 16 rows are rounded up to the same power of two, so they count as one shape
    implementation(name, args[0])(*_rows(16))
    assert clock.asked == 1
    for others in (_rows(17), _rows(12, outputs=6)):
        implementation(name, args[0])(*others)
    assert clock.asked == 3
    status = kernel_status("cpu")[name] if dispatch._unusable(torch.device("cpu")) is None else ""
    assert not status or status.endswith(f"torch's product: {3 * wins} of 3 shapes so far")


def test_nothing_is_timed_under_another_choice(timed):
    clock, args = timed(1.0, 2.0), _rows()
    for choice in ("reference", "triton"):
        with use(choice):
            implementation("row_sample_grad_weight", args[0])(*args)
    assert clock.asked == 0


def test_without_room_for_the_other_way_the_kernel_runs_untimed(timed, monkeypatch):
    clock, args, ran = timed(2.0, 1.0, free=4 * (12 * 8 + 5 * 8) - 1), _rows(), []
    monkeypatch.setitem(dispatch._kernels, "row_sample_grad_weight", lambda *args: ran.append(args))
    implementation("row_sample_grad_weight", args[0])(*args)
    assert clock.asked == 0 and len(ran) == 1
    timed(2.0, 1.0, free=4 * (12 * 8 + 5 * 8))
    implementation("row_sample_grad_weight", args[0])(*args)
    # the second run is the clock's
    assert len(ran) == 2


def test_memory_that_is_used_up_in_a_trial_leaves_the_kernel(timed, monkeypatch):
    clock, args, ran = timed(2.0, 1.0), _rows(), []
    monkeypatch.setitem(dispatch._kernels, "row_sample_grad_weight", lambda *args: ran.append(args))
    asked = []

    def too_much(*args: Any) -> Tensor:
        asked.append(args)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(FUNCTIONS, "row_sample_grad_weight", too_much)
    for _ in range(2):
        implementation("row_sample_grad_weight", args[0])(*args)
    # the clock tried the reference once; the kernel was run once by the clock, and once for each call
    assert clock.asked == len(asked) == 1 and len(ran) == 1 + 2


def test_a_graph_that_is_captured_takes_what_is_known(timed, monkeypatch):
    clock, args, ran = timed(1.0, 2.0), _rows(), []
    monkeypatch.setitem(dispatch._kernels, "row_sample_grad_weight", lambda *args: ran.append(args))
    for capturing, expected in ((True, 0), (False, 2), (True, 3)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        implementation("row_sample_grad_weight", args[0])(*args)
        assert len(ran) == expected
    assert clock.asked == 1


def test_timing_can_be_switched_off(timed, monkeypatch):
    clock, args = timed(1.0, 2.0), _rows()

    def is_reference() -> bool:
        return implementation("row_sample_grad_weight", args[0]) is row_sample_grad_weight

    assert not is_reference()
    torch.use_deterministic_algorithms(True)
    try:
        assert is_reference()
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setenv("HF_ACTCOMPRESS_TIMING", "0")
    assert is_reference() and not runs_kernel("int_group_grad_weight", args[0]) and clock.asked == 0


@pytest.mark.parametrize("codec", [IntGroup(4, 8, outliers=2), Float8("e4m3", 8)], ids=["int4", "fp8"])
@pytest.mark.parametrize("wins", [True, False])
def test_codes_are_unpacked_where_that_is_faster(codec, wins, timed):
    clock = timed(1.0, 2.0) if wins else timed(2.0, 1.0)
    x, dy = torch.randn(2, 20, 24), torch.randn(2, 20, 6)
    packed = codec.pack(x)
    assert codec.has_grad_weight(dy)
    for _ in range(2):
        dweight = codec.grad_weight(dy, *packed)
        assert (dweight is not None) is wins
    assert clock.asked == 1
    if wins:
        expected = dy.flatten(0, 1).t().mm(codec.unpack(*packed).flatten(0, 1))
        torch.testing.assert_close(dweight, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", TIMED)
def test_on_a_gpu_the_faster_one_is_found(name, monkeypatch):
    monkeypatch.setenv("HF_ACTCOMPRESS_TIMING", "1")
    monkeypatch.setattr(dispatch, "_decisions", Decisions())
    args = next(iter(dispatch._module(name).SAMPLES[name](torch.device("cuda"), torch.bfloat16, 64, 256)))
    state = torch.cuda.get_rng_state()
    found = implementation(name, args[0])(*args)
    torch.testing.assert_close(found, FUNCTIONS[name](*args), rtol=0.02, atol=0.02)
    assert len(dispatch._decisions.of(name)) == 1 and torch.equal(torch.cuda.get_rng_state(), state)
