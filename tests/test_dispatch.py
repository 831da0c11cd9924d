"""Which implementation runs: the explicit choices, kernels that cannot run, and `auto` with a kernel that is wrong."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_actcompress import dispatch, reference
from hf_actcompress.dispatch import implementation, kernel_status, use
from hf_actcompress.errors import KernelUnavailableError, UnknownOptionError
from hf_actcompress.kernels import BITWISE, KERNELS, POINTWISE, TIMED, TORCH_HAS, lacks_bf16
from hf_actcompress.methods.derivative.reference import activation_derivative
from hf_actcompress.reference.table import FUNCTIONS

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Dispatch remembers for the whole process which kernels a device can run; each test must start without that."""

    def forget() -> None:
        launchers = dispatch._launcher
        for known in (dispatch._unusable, dispatch._pointwise_only, dispatch._probe, launchers, lacks_bf16):
            known.cache_clear()
        dispatch._trusted.clear()
        dispatch._failed.clear()

    forget()
    yield
    forget()


def test_unknown_choice_lists_the_known():
    with pytest.raises(UnknownOptionError, match="'auto', 'reference', 'triton'"), use("cuda"):
        pass


def test_auto_on_a_cpu_is_the_reference():
    for name in KERNELS:
        assert implementation(name, torch.ones(2)) is FUNCTIONS[name]


def test_choices_nest_and_end_with_an_error():
    with pytest.raises(ValueError, match="stop"), use("triton"):
        with use("reference"):
            assert implementation("rms_norm_bwd", torch.ones(2)) is reference.rms_norm_bwd
        raise ValueError("stop")
    assert implementation("rms_norm_bwd", torch.ones(2)) is reference.rms_norm_bwd


def test_triton_on_a_cpu_raises(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with use("triton"):
        with pytest.raises(KernelUnavailableError, match="GPUs, not for cpu"):
            implementation("rms_norm_bwd", torch.ones(2))
        # this function has no kernel: torch's own op runs, whatever the choice
        assert implementation("layer_norm_fwd", torch.ones(2)) is reference.layer_norm_fwd


def test_triton_in_fp64_raises():
    with use("triton"), pytest.raises(KernelUnavailableError, match="fp64"):
        implementation("rms_norm_bwd", torch.ones(2, dtype=torch.float64))


def test_status_says_why(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert set(kernel_status("cpu").values()) == {"kernels are for GPUs, not for cpu"}
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    dispatch._unusable.cache_clear()
    assert set(kernel_status("cpu").values()) == {"triton is not installed"}


def test_old_gpus_are_told(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    assert set(kernel_status("cuda:0").values()) == {
        "the GPU is of compute capability 7.0, and 7.5 is the oldest supported"
    }


@pytest.mark.parametrize("hip", [None, "6.4"])
def test_pointwise_kernels_run_where_no_other_was_tried(hip, monkeypatch):
    """Such devices are NVIDIA's Turing GPUs, which have no bf16, and GPUs under ROCm."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5) if hip is None else (9, 4))
    monkeypatch.setattr(torch.version, "hip", hip)
    status = kernel_status("cuda:0")
    assert {name for name, said in status.items() if said.startswith("usable")} == POINTWISE
    others = "8.0 is the oldest supported" if hip is None else "only pointwise kernels run on ROCm"
    assert all(others in said for name, said in status.items() if name not in POINTWISE)
    assert ("no bf16" in status["int_group_pack"]) == (hip is None)
    for dtype, fits in {torch.bfloat16: hip is not None, torch.float16: True, torch.float64: False}.items():
        x = SimpleNamespace(dtype=dtype, device=torch.device("cuda:0"))
        assert (dispatch._unfit(x) in (None, "the tensor is a SimpleNamespace")) is fits


class _Wrapped(Tensor):
    pass


def test_triton_on_a_wrapped_tensor_raises():
    with use("triton"), pytest.raises(KernelUnavailableError, match="is a _Wrapped"):
        implementation("rms_norm_bwd", torch.ones(2).as_subclass(_Wrapped))


class _OnCuda:
    """The attributes of a CUDA tensor that `auto` reads."""

    is_cuda, is_xpu, device, dtype = True, False, torch.device("cuda:0"), torch.bfloat16


@pytest.mark.parametrize("trusted", [True, False])
def test_auto_on_a_gpu_is_the_kernel_once_it_is_trusted(trusted, monkeypatch):
    pytest.importorskip("triton")
    asked = []
    monkeypatch.setattr(dispatch, "_unfit", lambda x: None)
    monkeypatch.setattr(dispatch, "_unusable", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(dispatch, "_probed", lambda *key: asked.append(key) or (None if trusted else "wrong"))
    kernel, stock = dispatch._kernel("activation_bwd"), reference.activation_bwd
    for _ in range(2):
        found = implementation("activation_bwd", _OnCuda, "gelu_new")
        assert found.__wrapped__ is kernel if trusted else found is stock
    assert asked == [("activation_bwd", "gelu_new", torch.device("cuda:0"))]
    # for "gelu" torch has one kernel of its own, so `auto` keeps to the reference
    assert implementation("activation_bwd", _OnCuda, "gelu") is stock
    with use("reference"):
        assert implementation("activation_bwd", _OnCuda, "gelu_new") is stock


def test_auto_while_a_cuda_graph_is_captured_is_the_reference(monkeypatch):
    monkeypatch.setattr(dispatch, "_unfit", lambda x: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert implementation("rms_norm_bwd", _OnCuda) is reference.rms_norm_bwd
    assert not dispatch._trusted


def test_tables_name_kernels():
    assert set(TORCH_HAS) <= set(KERNELS) and set(BITWISE) <= set(KERNELS) and set(TIMED) <= set(KERNELS)


def test_a_probe_of_one_kind_leaves_the_others_alone(monkeypatch):
    pytest.importorskip("triton")
    module, seen = dispatch._module("activation_bwd"), []

    def recording(dy, x, kind, options=()):
        seen.append(kind)
        return reference.activation_bwd(dy, x, kind, options)

    monkeypatch.setattr(module, "activation_bwd", recording)
    assert dispatch._probed("activation_bwd", "mish", CPU) is None
    assert seen == ["mish"]
    assert dispatch._probed("activation_bwd", None, CPU) is None
    assert set(seen) == set(reference.ACTIVATIONS)


def test_a_second_xpu_is_launched_on_and_its_generator_put_back(monkeypatch):
    pytest.importorskip("triton")
    from hf_actcompress.kernels.common import on
    from hf_actcompress.kernels.probe import disagreement

    device, forked = torch.device("xpu:1"), []
    entered = on(SimpleNamespace(is_xpu=True, is_cuda=False, get_device=lambda: device.index))
    assert isinstance(entered, torch.xpu.device_of) and entered.idx == 1
    monkeypatch.setattr(
        torch.random, "fork_rng", lambda devices, device_type: forked.append((devices, device_type)) or nullcontext()
    )
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: nullcontext())
    module = SimpleNamespace(PROOFS={"float8_pack": lambda row, device: None})
    for asked in (device, torch.device("cuda:1"), CPU):
        assert disagreement("float8_pack", None, module, None, asked, False) is None
    assert forked == [([device], "xpu"), ([torch.device("cuda:1")], "cuda"), ([], "cuda")]


interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="probes in the interpreter")


@interpreted
def test_every_kernel_passes_its_probe(monkeypatch):
    pytest.importorskip("triton")
    state = torch.get_rng_state()
    status = kernel_status("cpu", probe=True)
    assert {name for name, said in status.items() if said == "usable"} == KERNELS.keys() - TIMED.keys()
    assert all("HF_ACTCOMPRESS_TIMING is 0" in status[name] for name in TIMED)
    monkeypatch.setenv("HF_ACTCOMPRESS_TIMING", "1")
    assert all(kernel_status("cpu")[name] == f"usable where it is faster than {TIMED[name]}" for name in TIMED)
    # a probe in the middle of training leaves dropout's masks alone
    assert torch.equal(torch.get_rng_state(), state)


def _off_by_a_little(dy: Tensor, x: Tensor, kind: str, options: Any = ()) -> Tensor:
    return 1.5 * reference.activation_bwd(dy, x, kind, options)


def _last_bits(x: Tensor, rstd: Tensor, weight: Any, formula: str) -> Tensor:
    y = reference.rms_norm_rebuild(x, rstd, weight, formula)
    return y * (1 + torch.finfo(y.dtype).eps)


def _of_another_dtype(x: Tensor, kind: str, options: Any = ()) -> Tensor:
    return activation_derivative(x, kind, options).double()


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
    monkeypatch.setattr(dispatch, "KERNELS", {name: KERNELS[name]})
    with caplog.at_level(logging.WARNING, logger="hf_actcompress"):
        assert said in kernel_status(CPU, probe=True)[name]
        # the status is the same when it is asked for again, and the warning is logged only once
        assert said in kernel_status(CPU, probe=True)[name]
    (record,) = caplog.records
    assert name in record.getMessage() and said in record.getMessage()
