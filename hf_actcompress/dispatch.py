"""Which implementation of a function runs: a Triton kernel or the torch reference.

`implementation(name, x)` chooses by x's device and by what is installed; `use("reference")` and `use("triton")` are
explicit choices for a block of code. An explicit choice never falls back: under "triton" a kernel that cannot run
raises (a function without a kernel runs torch's own op, whatever the choice). `auto` takes a kernel on a CUDA device,
or on an XPU (pointwise kernels), once the kernel has agreed there with the reference in this process, and the reference
everywhere else. It is not known for which shapes the kernels of the table `TIMED` are faster: `auto` times both when it
meets a shape for the first time, unless the environment variable HF_ACTCOMPRESS_TIMING is "0" or torch is asked for
deterministic results. If a launch fails later, the reference runs in its place from then on, with a warning.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .compiling import is_compiling
from .errors import KernelUnavailableError, UnknownOptionError
from .kernels import BITWISE, KERNELS, POINTWISE, TIMED, TORCH_HAS, lacks_bf16
from .kernels.fallback import with_fallback
from .kernels.timing import Decisions, shape_class
from .reference.device_rules import device_rules
from .reference.table import FUNCTIONS

CHOICES = ("auto", "reference", "triton")
# the oldest NVIDIA compute capability for pointwise kernels, and for all kernels
OLDEST, OLDEST_OF_ALL = (7, 5), (8, 0)

_log = logging.getLogger(__name__)
_kernels: dict[str, Callable[..., Any]] = {}
_trusted: dict[tuple[str, str | None, torch.device], bool] = {}
# the error of each trusted kernel whose launch has failed
_failed: dict[tuple[str, torch.device], str] = {}
_probing = threading.RLock()
_decisions = Decisions()

# one for the process, not per thread or context: backward runs in autograd's threads, and torch.compile reads it
_choice = "auto"


@contextmanager
def use(choice: str) -> Iterator[None]:
    """Run a block with "reference", "triton" or "auto" implementations. Raises UnknownOptionError for another name."""
    if choice not in CHOICES:
        raise UnknownOptionError("implementation", choice, CHOICES)
    global _choice
    if choice == "triton" and importlib.util.find_spec("triton") is not None:
        # imported now, because nothing can be imported while a graph is traced
        for name in KERNELS:
            _kernel(name)
    before, _choice = _choice, choice
    try:
        yield
    finally:
        _choice = before


def chosen() -> str:
    """Which implementations are asked for now."""
    return _choice


def implementation(name: str, x: Tensor, row: str | None = None) -> Callable[..., Any]:
    """The function `name` of `reference/`, or the kernel of the same name and signature where one is usable for x.

    `row` selects one case of a kernel: the kind of an activation, or the formula of a norm. `auto` tries each case on
    its own before it trusts it; for a case that torch computes by one kernel of its own, it keeps to the reference.
    """
    if runs_kernel(name, x, row):
        if _choice == "triton":
            return _kernel(name)
        return partial(_faster, name) if name in TIMED else _launcher(name, row, x.device)
    # fake tensors have a type of their own
    rules = None if type(x) is Tensor else device_rules()
    function: Callable[..., Any] = FUNCTIONS[name] if rules is None else rules.function(name)
    return function


def runs_kernel(name: str, x: Tensor, row: str | None = None) -> bool:
    """Whether `implementation` returns a kernel; one of `TIMED` then runs only where it is faster.

    For callers that have a better alternative than the reference. For a kernel of `TIMED` they also ask `kernel_wins`
    with the arguments.
    """
    if _choice == "triton" and name in KERNELS:
        _require(name, x)
        return True
    # the reference while a graph is traced: a compiler fuses it with its neighbours and may recompute it, which it
    # cannot do with a kernel of ours
    if _choice != "auto" or name not in KERNELS or is_compiling():
        return False
    if name in TIMED and not _may_time():
        return False
    return row not in TORCH_HAS.get(name, ()) and _takes(name, x, row)


def kernel_status(device: torch.device | str, *, probe: bool = False) -> dict[str, str]:
    """For every kernel: "usable" on that device, or why the reference runs there under `auto`.

    Args:
        device: Such as "cuda:0".
        probe: Compile each kernel and compare it with the reference, as its first use does: for all kernels this takes
            a minute the first time on a machine. False: only the device and the installation count.
    """
    device = _indexed(torch.device(device))
    found = {
        name: _without(name, device) or _failed.get((name, device)) or (probe and _probed(name, None, device))
        for name in KERNELS
    }
    timed = {name: _timing_status(name) for name in TIMED}
    good = "usable for fp16 and fp32: there is no bf16" if lacks_bf16(device) else "usable"
    return {name: reason or timed.get(name, good) for name, reason in found.items()}


def kernel_wins(name: str, other: Callable[..., Any], *args: Any) -> bool:
    """Whether a kernel of `TIMED` runs for these arguments, the first of which is dy, instead of `other`.

    If `auto` has not decided yet, both run on the arguments. So neither may write to them or draw random numbers.
    """
    if _choice == "triton":
        return True
    shape, device = shape_class(name, args), args[0].device
    known = _decisions.known(shape)
    if known is None and not torch.cuda.is_current_stream_capturing():
        kernel = partial(_launcher(name, None, device), *args)
        known = _decisions.kernel_wins(shape, kernel, partial(other, *args), device, _made_by_other(args))
    return bool(known)


def _faster(name: str, *args: Any) -> Any:
    """The result of the kernel, or of the reference's function where that one is faster."""
    stock = FUNCTIONS[name]
    return (_launcher(name, None, args[0].device) if kernel_wins(name, stock, *args) else stock)(*args)


def _made_by_other(args: tuple[Any, ...]) -> int:
    """The most bytes that are allocated without the kernel: for a copy of x or dy, and for dW."""
    dy, *stored = args
    outputs, widths = dy.size(-1), [x.size(-1) for x in stored if isinstance(x, Tensor)]
    features = max([*widths, *(arg for arg in stored if type(arg) is int)])
    rows = dy.numel() // max(outputs, 1)
    return int((rows * max(features, outputs) + outputs * features) * dy.element_size())


def _may_time() -> bool:
    return os.environ.get("HF_ACTCOMPRESS_TIMING") != "0" and not torch.are_deterministic_algorithms_enabled()


def _timing_status(name: str) -> str:
    """The status of a kernel of `TIMED`."""
    if not _may_time():
        return "on request only: HF_ACTCOMPRESS_TIMING is 0, or torch is asked for deterministic results"
    found = _decisions.of(name)
    seen = f": {sum(found)} of {len(found)} shapes so far" if found else ""
    return f"usable where it is faster than {TIMED[name]}{seen}"


def _takes(name: str, x: Tensor, row: str | None) -> bool:
    """Whether `auto` runs the kernel on x."""
    if not (x.is_cuda or x.is_xpu) or _unfit(x):
        return False
    known = _trusted.get((name, row, x.device))
    if known is None:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        known = _without(name, x.device) is None and _probed(name, row, x.device) is None
        _trusted[name, row, x.device] = known
    return known


def _unfit(x: Tensor) -> str | None:
    """Why no kernel can run on such a tensor."""
    if x.dtype == torch.float64:
        return "no kernel computes in fp64"
    if x.dtype == torch.bfloat16 and lacks_bf16(x.device):
        return "the GPU has no bf16"
    # sharded, fake and wrapped tensors have no memory of their own
    return None if type(x) in (Tensor, torch.nn.Parameter) else f"the tensor is a {type(x).__name__}"


def _require(name: str, x: Tensor) -> None:
    """Raise unless the kernel can run on x."""
    if is_compiling():
        return
    reason = _unfit(x) or _without(name, x.device)
    if reason:
        raise KernelUnavailableError(f'asked for the Triton kernel of {name!r}: {reason}; use "auto" or "reference"')


def _indexed(device: torch.device) -> torch.device:
    if device.index is not None or device.type not in ("cuda", "xpu"):
        return device
    module = torch.get_device_module(device)
    return torch.device(device.type, module.current_device()) if module.is_available() else device


@cache
def _unusable(device: torch.device) -> str | None:
    """Why no kernel runs on that device."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        return None
    if device.type not in ("cuda", "xpu"):
        return f"kernels are for GPUs, not for {device.type}"
    if not torch.get_device_module(device).is_available():
        return f"torch finds no {device.type.upper()} device"
    return _older_than(OLDEST, device)


def _without(name: str, device: torch.device) -> str | None:
    """Why that kernel does not run on that device."""
    return _unusable(device) or (None if name in POINTWISE else _pointwise_only(device))


@cache
def _pointwise_only(device: torch.device) -> str | None:
    """Why none but pointwise kernels run on that device."""
    if os.environ.get("TRITON_INTERPRET", "0") == "1" or not torch.get_device_module(device).is_available():
        return None
    if device.type == "xpu" or torch.version.hip is not None:
        return f"only pointwise kernels run on {'XPU' if device.type == 'xpu' else 'ROCm'}, where none has been tried"
    return _older_than(OLDEST_OF_ALL, device)


def _older_than(oldest: tuple[int, int], device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    if torch.cuda.get_device_capability(device) >= oldest:
        return None
    return f"the GPU is of compute capability {capability}, and {oldest[0]}.{oldest[1]} is the oldest supported"


def _probed(name: str, row: str | None, device: torch.device) -> str | None:
    """Why `auto` does not trust the kernel on that device; with `row` None, in any of its cases."""
    with _probing:
        return _probe(name, row, device)


@cache
def _probe(name: str, row: str | None, device: torch.device) -> str | None:
    from .kernels.probe import disagreement

    reason = disagreement(name, row, _module(name), FUNCTIONS[name], device, name in BITWISE)
    if reason:
        of = f"{name} ({row})" if row else name
        _log.warning("the Triton kernel of %s is not used on %s: %s; the torch reference runs", of, device, reason)
    return reason


@cache
def _launcher(name: str, row: str | None, device: torch.device) -> Callable[..., Any]:
    """The kernel for `auto`. Once it fails, the returned function calls the reference, also for those who hold it."""

    def failed(reason: str) -> None:
        _trusted[name, row, device] = False
        of = f"{name} ({row})" if row else name
        _failed[name, device] = f"{of} failed: {reason}; the torch reference runs instead"
        _log.warning("the Triton kernel of %s failed on %s: %s; the torch reference runs instead", of, device, reason)

    return with_fallback(_kernel(name), FUNCTIONS[name], device, failed)


def _kernel(name: str) -> Callable[..., Any]:
    if name not in _kernels:
        from .kernels.recorded import recorded

        _kernels[name] = recorded(getattr(_module(name), name))
    return _kernels[name]


def _module(name: str) -> ModuleType:
    return importlib.import_module(f".{KERNELS[name]}", __package__)
