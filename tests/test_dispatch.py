"""Which implementation runs: choices, what cannot run, and what `auto` makes of a kernel that is wrong."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_actcompress import dispatch, reference
from hf_actcompress.dispatch import implementation, kernel_status, use
from hf_actcompress.errors import KernelUnavailableError, UnknownOptionError
from hf_actcompress.kernels import BITWISE, KERNELS, TORCH_HAS

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """What was found out about a device is kept for the process."""
    dispatch._unusable.cache_clear()
    dispatch._probe.cache_clear()
    yield
    dispatch._unusable.cache_clear()
    dispatch._probe.cache_clear()


def test_unknown_choice_lists_the_known():
    with pytest.raises(UnknownOptionError, match="'auto', 'reference', 'triton'"), use("cuda"):
        pass


def test_auto_on_a_cpu_is_the_reference():
    for name in KERNELS:
        assert implementation(name, torch.ones(2)) is getattr(reference, name)


def test_choices_nest_and_end_with_an_error():
    with pytest.raises(ValueError, match="stop"), use("triton"):
        with use("reference"):
            assert implementation("rms_norm_bwd", torch.ones(2)) is reference.rms_norm_bwd
        raise ValueError("stop")
    assert implementation("rms_norm_bwd", torch.ones(2)) is reference.rms_norm_bwd


def test_triton_on_a_cpu_raises(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with use("triton"):
        with pytest.raises(KernelUnavailableError, match="NVIDIA GPUs, not for cpu"):
            implementation("rms_norm_bwd", torch.ones(2))
        # torch's own op under every choice
        assert implementation("layer_norm_fwd", torch.ones(2)) is reference.layer_norm_fwd


def test_triton_in_fp64_raises():
    with use("triton"), pytest.raises(KernelUnavailableError, match="fp64"):
        implementation("rms_norm_bwd", torch.ones(2, dtype=torch.float64))


def test_status_says_why(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert set(kernel_status("cpu").values()) == {"kernels are for NVIDIA GPUs, not for cpu"}
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    dispatch._unusable.cache_clear()
    assert set(kernel_status("cpu").values()) == {"triton is not installed"}


def test_old_gpus_are_told(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert set(kernel_status("cuda:0").values()) == {
        "the GPU is of compute capability 7.5, and 8.0 is the oldest supported"
    }


def test_tables_name_kernels():
    assert set(TORCH_HAS) <= set(KERNELS) and set(BITWISE) <= set(KERNELS)


interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="probes in the interpreter")


@interpreted
def test_every_kernel_passes_its_probe():
    pytest.importorskip("triton")
    state = torch.get_rng_state()
    assert kernel_status("cpu") == dict.fromkeys(KERNELS, "usable")
    # a probe in the middle of training leaves dropout's masks alone
    assert torch.equal(torch.get_rng_state(), state)


def _off_by_a_little(dy: Tensor, x: Tensor, kind: str, options: Any = ()) -> Tensor:
    return 1.5 * reference.activation_bwd(dy, x, kind, options)


def _last_bits(x: Tensor, rstd: Tensor, weight: Any, variant: str) -> Tensor:
    y = reference.rms_norm_rebuild(x, rstd, weight, variant)
    return y * (1 + torch.finfo(y.dtype).eps)


def _of_another_dtype(x: Tensor, kind: str, options: Any = ()) -> Tensor:
    return reference.activation_derivative(x, kind, options).double()


def _does_not_compile(*_: Any) -> Tensor:
    raise RuntimeError("ptxas failed")


@interpreted
@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("activation_bwd", _off_by_a_little, "disagrees with the reference"),
        ("rms_norm_rebuild", _last_bits, "disagrees with the reference"),
        ("activation_derivative", _of_another_dtype, "disagrees with the reference"),
        ("activation_bwd", _does_not_compile, "does not run: RuntimeError: ptxas failed"),
    ],
)
def test_a_wrong_kernel_is_not_used(name, wrong, said, monkeypatch, caplog):
    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch._module(name), name, wrong)
    with caplog.at_level(logging.WARNING, logger="hf_actcompress"):
        assert said in str(dispatch._why_not(name, CPU))
        # asked again, said once
        assert said in str(dispatch._why_not(name, CPU))
    (record,) = caplog.records
    assert name in record.getMessage() and said in record.getMessage()
