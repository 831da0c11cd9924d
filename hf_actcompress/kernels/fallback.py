"""A kernel whose launch fails in the middle of a training: the reference takes its place."""

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
    """`kernel` until a launch of it fails, from then on `stock`, its reference; `failed` is told the error, once.

    A kernel writes only into what its launcher allocates, so that the reference starts from what the kernel started
    from. The exception, a gradient that the caller owns, is written by a launcher's last launch: one that fails has
    written nothing. Three errors are not the kernel's and are raised: the memory is used up; the device is lost, and
    with it the reference; the reference raises for these arguments as well.
    """
    broken = False

    @functools.wraps(kernel)
    def launch(*args: Any) -> Any:
        nonlocal broken
        if broken:
            return stock(*args)
        try:
            return kernel(*args)
        except Exception as error:
            if _out_of_memory(error) or _is_lost(device):
                raise
            reason = f"{type(error).__name__}: {error}"
        # here, where the error no longer holds what the launcher has allocated
        result = stock(*args)
        with _falling:
            first, broken = not broken, True
        if first:
            failed(reason)
        return result

    return launch


def _out_of_memory(error: Exception) -> bool:
    """torch's own error, or the driver's when it loads a kernel."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def _is_lost(device: torch.device) -> bool:
    """Whether nothing runs on the device any more, as after an illegal access: it tells every caller that waits."""
    # while a graph is captured nobody may wait; a capture that is lost tells the reference so
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return False
    try:
        torch.cuda.synchronize(device)
    except Exception:
        return True
    return False
