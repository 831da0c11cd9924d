"""Which of two ways to the same result is the faster one on the user's device: both are run there, once per shape.

For kernels of which nobody can say it beforehand (`TIMED` of this package). The clock stands apart from the decision.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

# of each way after a first one, which compiles and fills caches
RUNS = 5
# a kernel has to be this much faster: the other way is torch's own, and a measurement has an error
MARGIN = 0.97

_Run = Callable[[], Any]


def is_faster(kernel: Sequence[float], other: Sequence[float]) -> bool:
    """Whether a kernel's times say that it is faster than the other way."""
    return statistics.median(kernel) < MARGIN * statistics.median(other)


def cuda_milliseconds(ways: Sequence[_Run], device: torch.device) -> list[list[float]]:
    """Of each way, by events on the current stream, in turns: what else the device does meets both alike."""
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
    """What can be allocated on a device without asking another process for memory."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def shape_class(name: str, args: Sequence[Any]) -> Hashable:
    """What the decision depends on: widths as they are, numbers of rows by the power of two that holds them."""
    return name, *(_of_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args)


def _of_tensor(x: Tensor) -> Hashable:
    width = x.shape[-1:] if x.dim() > 1 else ()
    return x.device, x.dtype, *((size - 1).bit_length() for size in x.shape[: x.dim() - len(width)]), *width


class Decisions:
    """What has been found out in this process.

    Args:
        clock: Times of each of several ways on a device.
        free_bytes: Of a device.
    """

    def __init__(
        self,
        clock: Callable[[Sequence[_Run], torch.device], list[list[float]]] = cuda_milliseconds,
        free_bytes: Callable[[torch.device], int] = cuda_free_bytes,
    ) -> None:
        self._clock, self._free_bytes = clock, free_bytes
        self._known: dict[Hashable, bool] = {}
        # backward runs in several threads: one measures at a time
        self._lock = threading.Lock()

    def known(self, shape: Hashable) -> bool | None:
        """Whether the kernel is the faster one for a `shape_class`; None: nobody has looked."""
        return self._known.get(shape)

    def of(self, name: str) -> list[bool]:
        """The decisions about one kernel."""
        return [won for shape, won in self._known.items() if isinstance(shape, tuple) and shape[0] == name]

    def kernel_wins(self, shape: Hashable, kernel: _Run, other: _Run, device: torch.device, needed: int) -> bool:
        """Whether the kernel is the faster one, found out now if it is not known.

        Args:
            needed: Bytes that the other way makes. Where there is no room for them the kernel is taken, for this call;
                for all, if the memory is used up in the middle of a trial.
        """
        with self._lock:
            if shape not in self._known:
                if needed > self._free_bytes(device):
                    return True
                try:
                    with torch.no_grad():
                        self._known[shape] = is_faster(*self._clock((kernel, other), device))
                except torch.OutOfMemoryError:
                    self._known[shape] = True
            return self._known[shape]
