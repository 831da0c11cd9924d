"""What autocast does to an op, made explicit: forward runs with it, backward without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..compiling import is_compiling

_NOTHING = nullcontext()
# so that nobody need be asked
_WITH_AUTOCAST = frozenset(("cpu", "cuda"))
_has_autocast = cache(torch.amp.is_autocast_available)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts the inputs of a matmul on x's device; None where it does not."""
    dtype = autocast_on(x.device.type)
    return dtype if dtype is not None and x.is_floating_point() and x.dtype != torch.float64 else None


def autocast_on(device: str) -> torch.dtype | None:
    """The dtype of autocast on a type of device; None where it is off."""
    # torch 2.11 cannot trace this check, and every device that we compile for has autocast
    available = device in _WITH_AUTOCAST or is_compiling() or _has_autocast(device)
    return torch.get_autocast_dtype(device) if available and torch.is_autocast_enabled(device) else None


def device_under_autocast(grads: Sequence[Tensor | None]) -> str | None:
    """The type of the device of these gradients, of which some may be None, if autocast is on for it; else None."""
    for dy in grads:
        if dy is not None:
            return dy.device.type if torch.is_autocast_enabled(dy.device.type) else None
    return None


def autocast_off(device: str) -> AbstractContextManager[Any]:
    """Autocast off for a type of device: code that makes its casts itself may be called under autocast."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NOTHING


def autocast_widens(x: Tensor) -> bool:
    """Whether autocast runs LayerNorm of x in fp32. It does so on every device but the CPU."""
    return autocast_dtype(x) is not None and x.device.type != "cpu"


def in_fp32(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The tensors on which LayerNorm computes under such an autocast: its kernels need one dtype for all of them."""
    return x.float(), weight.float() if weight is not None else None, bias.float() if bias is not None else None


class SameAutocast:
    """A function that always runs under the autocast state in which it was wrapped. It holds no tensor."""

    __slots__ = ("device", "dtype", "function")

    def __init__(self, function: Callable[..., Any], x: Tensor) -> None:
        self.function = function
        self.device = x.device.type
        self.dtype = autocast_dtype(x)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # no weight cache: a cached cast would outlive the backward that made it
        with torch.autocast(self.device, self.dtype, enabled=self.dtype is not None, cache_enabled=False):
            return self.function(*args, **kwargs)
