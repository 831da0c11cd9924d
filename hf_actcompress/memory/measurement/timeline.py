"""`memory_timeline`: memory over time in one step; the forward makes it rise, the backward makes it fall."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...display.pictures import Target, draw_timelines
from ...display.report import Report
from ...quick.sizes import readable_size
from .allocator import BACKWARD, OPTIMIZER, allocator_events, collected, measurable, memory_profiler, running_sums


@dataclass(frozen=True)
class MemoryTimeline(Report):
    """Bytes held at each allocation and free of a step, above what was there before it. It draws and serialises.

    Args:
        seconds: Since the first event. The profiler makes the step slower than it is.
        bytes: Held after each event.
        backward: Start and end of the autograd engine's run, in seconds; None if it did not run.
        optimizer: The same for the optimizer's step.
    """

    seconds: tuple[float, ...]
    bytes: tuple[int, ...]
    backward: tuple[float, float] | None = None
    optimizer: tuple[float, float] | None = None

    @property
    def peak_bytes(self) -> int:
        """The highest point."""
        return max(self.bytes, default=0)

    @property
    def peak_seconds(self) -> float:
        """When the peak was reached, in seconds."""
        return self.seconds[self.bytes.index(self.peak_bytes)] if self.peak_bytes else 0.0

    @property
    def kept_bytes(self) -> int:
        """Bytes held when the backward began: what the forward kept for it, its outputs and the loss."""
        return self.at(self.backward[0]) if self.backward is not None else 0

    @property
    def left_bytes(self) -> int:
        """Bytes held at the end: gradients or optimizer states that did not exist before."""
        return self.bytes[-1] if self.bytes else 0

    def at(self, seconds: float) -> int:
        """Bytes held at a moment."""
        events = bisect_right(self.seconds, seconds)
        return self.bytes[events - 1] if events else 0

    def derived(self) -> dict[str, Any]:
        """The figures that follow from the events."""
        return {"peak_bytes": self.peak_bytes, "kept_bytes": self.kept_bytes, "left_bytes": self.left_bytes}

    def __str__(self) -> str:
        lines = f"peak {readable_size(self.peak_bytes)}, at the end {readable_size(self.left_bytes)}"
        if self.backward is None:
            return lines
        phase = "forward" if self.peak_seconds < self.backward[0] else "backward"
        if self.optimizer is not None and self.peak_seconds >= self.optimizer[0]:
            phase = "the optimizer's step"
        return f"{lines}; {readable_size(self.kept_bytes)} when backward began, the peak in {phase}"

    def plot(self, target: Target) -> None:
        """The curve. See `Report.plot`."""
        draw_timelines({"": self}, target)


def memory_timeline(step: Callable[[], object], device: torch.device | str) -> MemoryTimeline:
    """Memory over time in one step, from the allocator's own events.

    Args:
        step: Runs the step once: forward and backward, perhaps the optimizer. Run it once before, so that the
            gradients exist already and the curve does not rise by them.
        device: The model's device: a CPU or a CUDA device.

    Returns:
        The curve: `.plot(path)`, `.to_json()`, peak, and what was held when backward began.

    Raises:
        MeasurementError: Another kind of device, or no allocator events.
    """
    kind = measurable(device).type
    with collected(), memory_profiler() as profiler:
        step()
    return timeline_of(profiler, kind)


def timeline_of(profiler: Any, kind: str) -> MemoryTimeline:
    """The curve of a profiler that has ended, for the allocator of one kind of device."""
    allocations, spans = allocator_events(profiler, kind)
    if not allocations:
        return MemoryTimeline((), ())
    start = allocations[0][0]

    def phase(prefix: str) -> tuple[float, float] | None:
        found = [(begin, end) for name, begin, end in spans if name.startswith(prefix)]
        return ((found[0][0] - start) / 1e9, (max(end for _, end in found) - start) / 1e9) if found else None

    seconds = tuple((time - start) / 1e9 for time, _, _ in allocations)
    return MemoryTimeline(seconds, tuple(running_sums(allocations)), phase(BACKWARD), phase(OPTIMIZER))
