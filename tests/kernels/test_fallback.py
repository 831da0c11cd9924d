"""If a kernel fails after `auto` has trusted it, the reference runs instead, also for callers that hold the kernel."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hf_actcompress import dispatch
from hf_actcompress.dispatch import implementation, use
from hf_actcompress.kernels import fallback
from hf_actcompress.reference.table import FUNCTIONS
from tests.kernels.harness import present, samples
from tests.oracle import assert_equal_bits

# some tests launch a kernel on tensors of the CPU
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU")

CPU = torch.device("cpu")
NAME, ROW = "rms_norm_bwd", "weight_after_cast"


class _Accelerated:
    """The attributes that `auto` reads of an accelerator's tensor. The kernel itself runs in the interpreter."""

    is_cuda, device, dtype = True, CPU, torch.float32


class _Failing:
    """A launcher that raises `error` once a test has set it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.error, self.calls = kernel, None, 0

    def __call__(self, *args: Any, **words: Any) -> Any:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return self.kernel(*args, **words)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Failing]:
    monkeypatch.setattr(dispatch, "_unfit", lambda x: None)
    monkeypatch.setattr(dispatch, "_trusted", {(NAME, ROW, CPU): True})
    monkeypatch.setattr(dispatch, "_failed", {})
    launcher = _Failing(dispatch._kernel(NAME))
    monkeypatch.setitem(dispatch._kernels, NAME, launcher)
    dispatch._launcher.cache_clear()
    yield launcher
    dispatch._launcher.cache_clear()


def found() -> Any:
    return implementation(NAME, _Accelerated, ROW)  # type: ignore[arg-type]


def arguments() -> tuple[Any, ...]:
    return next(args for args in samples(NAME, torch.float32, 5, 24) if args[4] == ROW)


@interpreted
def test_the_reference_runs_instead_and_it_is_said_once(failing: _Failing, caplog: pytest.LogCaptureFixture) -> None:
    args, held = arguments(), found()
    kernels, stocks = failing.kernel(*args), FUNCTIONS[NAME](*args)
    assert_equal_bits(present(held(*args)), present(kernels))
    failing.error = RuntimeError("out of resource: shared memory")
    with caplog.at_level(logging.WARNING, logger="hf_actcompress"):
        assert_equal_bits(present(held(*args)), present(stocks))
        failing.error, launches = None, failing.calls
        # the held function and a new lookup both run the reference
        assert_equal_bits(present(held(*args)), present(stocks))
        assert found() is FUNCTIONS[NAME] and failing.calls == launches
    (record,) = caplog.records
    said = f"{NAME} ({ROW}) failed on cpu: RuntimeError: out of resource: shared memory"
    assert record.name.startswith("hf_actcompress") and said in record.getMessage()
    assert said.removeprefix(f"{NAME} ({ROW}) failed on cpu: ") in dispatch.kernel_status(CPU)[NAME]
    assert all("failed" not in status for name, status in dispatch.kernel_status(CPU).items() if name != NAME)
    # other cases of the same kernel still run
    assert dispatch._launcher(NAME, "one_plus_weight", CPU).__wrapped__ is failing


@interpreted
def test_an_explicit_choice_raises(failing: _Failing) -> None:
    failing.error = RuntimeError("ptxas failed")
    with use("triton"), pytest.raises(RuntimeError, match="ptxas failed"):
        implementation(NAME, torch.ones(2), ROW)(*arguments())


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("Triton Error [CUDA]: out of memory"), False),
        (RuntimeError("an illegal memory access was encountered"), True),
    ],
)
def test_what_is_not_the_kernels_fault_is_raised(
    error: Exception, lost: bool, failing: _Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fallback, "_is_lost", lambda device: lost)
    failing.error = error
    with pytest.raises(RuntimeError, match=r"out of memory|illegal"):
        found()(*arguments())
    failing.error = None
    assert found().__wrapped__ is failing


def test_arguments_that_the_reference_refuses_are_not_the_kernels_fault(failing: _Failing) -> None:
    dy, *rest = arguments()
    failing.error = ValueError("of the launcher")
    with pytest.raises(RuntimeError, match="size of tensor"):
        found()(dy[:, :-1], *rest)
    failing.error = None
    assert found().__wrapped__ is failing


def test_a_lost_device_is_one_that_raises_when_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing, cuda = False, torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert not fallback._is_lost(cuda)

    def broken(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert fallback._is_lost(cuda) and not fallback._is_lost(CPU)
    capturing = True
    assert not fallback._is_lost(cuda)


@interpreted
def test_keywords_reach_the_kernel_and_the_reference(failing: _Failing) -> None:
    """As `activation_derivative` gives its function and its kind."""
    args = next(samples(NAME, torch.float32, 3, 8))
    words = dict(zip(inspect.signature(FUNCTIONS[NAME]).parameters, args, strict=False))
    for error in (None, RuntimeError("lost")):
        failing.error = error
        assert_equal_bits(present(found()(*args[:1], **dict([*words.items()][1:]))), present(found()(*args)))
