"""Replaces a kernel whose launch fails in the middle of a training by the reference."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

_falling = threading.Lock()


def with_fallback(
    kernel: Callable[..., Any], stock: Callable[..., Any], device: torch.device, failed: Callable[[str], None]
) -> Callable[..., Any]:
    """`kernel` until one of its launches fails, and from then on `stock`, its reference. `failed` gets the error, once.

    A kernel writes only to memory that its launcher allocates, so the reference finds the same inputs. The one
    exception is a gradient that the caller owns: a launcher's last launch writes it, and a launch that fails has
    written nothing. Three errors are raised, because they are not the kernel's fault: the memory is used up; the device
    is lost, so the reference cannot run either; the reference raises for these arguments as well.
    """
    broken = False

    @functools.wraps(kernel)
    def launch(*args: Any, **words: Any) -> Any:
        nonlocal broken
        if broken:
            return stock(*args, **words)
        try:
            return kernel(*args, **words)
        except Exception as error:
            # torch has an error of its own for it, and the driver another one when it loads a kernel
            used_up = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
            if used_up or _is_lost(device):
                raise
            reason = f"{type(error).__name__}: {error}"
        # outside of the handler, so that the error no longer holds what the launcher has allocated
        result = stock(*args, **words)
        with _falling:
            first, broken = not broken, True
        if first:
            failed(reason)
        return result

    return launch


def _is_lost(device: torch.device) -> bool:
    """Whether the device can run nothing any more, as after an illegal access: then synchronising raises an error."""
    # synchronising is forbidden during a graph capture; if the capture is lost, the reference raises the error
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return False
    try:
        torch.cuda.synchronize(device)
    except Exception:
        return True
    return False
