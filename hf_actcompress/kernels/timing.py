"""Decides which of two ways to the same result is faster on the user's device: it runs both there, once per shape.

It is for kernels whose speed cannot be predicted (`TIMED` of this package). The clock is an argument of the decision.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

# timed runs of each way, after a first one, which compiles and fills caches
RUNS = 5
# a kernel's time must be at most this share of the other way's: that one is torch's own, and measurements have errors
MARGIN = 0.97

_Run = Callable[[], Any]


def cuda_milliseconds(ways: Sequence[_Run], device: torch.device) -> list[list[float]]:
    """Times of each way, by events on the current stream. The ways alternate, so other work affects both alike."""
    events = []
    with torch.cuda.device(device):
        for run in ways:
            run()
        for _ in range(RUNS):
            for run in ways:
                pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
                pair[0].record()
                run()
                pair[1].record()
                events.append(pair)
        torch.cuda.current_stream(device).synchronize()
    times = [begin.elapsed_time(end) for begin, end in events]
    return [times[i :: len(ways)] for i in range(len(ways))]


def cuda_free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on a device without taking memory from another process."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def shape_class(name: str, args: Sequence[Any]) -> Hashable:
    """The key of a decision: the widths, and each number of rows rounded up to a power of two."""
    return name, *(_of_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args)


def _of_tensor(x: Tensor) -> Hashable:
    width = x.shape[-1:] if x.dim() > 1 else ()
    return x.device, x.dtype, *((size - 1).bit_length() for size in x.shape[: x.dim() - len(width)]), *width


class Decisions:
    """The decisions that this process has made.

    Args:
        clock: Gives the times of each of several ways on a device.
        free_bytes: Gives the free bytes of a device.
    """

    def __init__(
        self,
        clock: Callable[[Sequence[_Run], torch.device], list[list[float]]] = cuda_milliseconds,
        free_bytes: Callable[[torch.device], int] = cuda_free_bytes,
    ) -> None:
        self._clock, self._free_bytes = clock, free_bytes
        self._known: dict[Hashable, bool] = {}
        # backward runs in several threads, and only one of them may measure at a time
        self._lock = threading.Lock()

    def known(self, shape: Hashable) -> bool | None:
        """Whether the kernel is faster for a `shape_class`; None if that has not been measured."""
        return self._known.get(shape)

    def of(self, name: str) -> list[bool]:
        """All decisions about one kernel."""
        return [won for shape, won in self._known.items() if isinstance(shape, tuple) and shape[0] == name]

    def kernel_wins(self, shape: Hashable, kernel: _Run, other: _Run, device: torch.device, needed: int) -> bool:
        """Whether the kernel is faster; measured now if it has not been.

        Args:
            shape: The `shape_class` of the call.
            kernel, other: The two ways.
            device: The device to measure on.
            needed: Bytes that the other way allocates. If they are not free, the kernel is used for this call; if
                memory runs out during a measurement, it is used for all calls.
        """
        with self._lock:
            if shape not in self._known:
                if needed > self._free_bytes(device):
                    return True
                try:
                    with torch.no_grad():
                        ours, others = map(statistics.median, self._clock((kernel, other), device))
                    self._known[shape] = ours < MARGIN * others
                except torch.OutOfMemoryError:
                    self._known[shape] = True
            return self._known[shape]
