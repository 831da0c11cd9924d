"""Logs the memory of training steps in the Trainer's own logs, where every tracker finds it."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from ..errors import MeasurementError
from ..memory.measurement.allocator import memory_profiler
from ..memory.measurement.compiled import compiled_modules
from ..memory.measurement.timeline import timeline_of
from ..memory.measurement.training_restored import resident_bytes
from ..private_apis import profiler_runs
from ..quick.sizes import readable_size

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from ..memory.estimation.result import Estimate

logger = logging.getLogger(__name__)

# kinds of devices whose memory can be measured
MEASURED = ("cpu", "cuda")
KEPT, PEAK, RATIO = "memory_kept_bytes", "memory_peak_bytes", "memory_peak_of_estimate"


class MemoryCallback(TrainerCallback):  # type: ignore[misc]
    """Logs what the steps keep for backward, and their peak, to every tracker of the Trainer (`report_to`).

    Give it to the Trainer in `callbacks`, or later with `trainer.add_callback`: it puts itself before the trackers.
    `ActCompressCallback` does the same by itself, and leaves it to a `MemoryCallback` if there is one.

    Each log entry with a loss gets ``memory_peak_bytes``, the highest peak of the steps sampled since the last entry
    (everything on the device, with weights and optimizer states); ``memory_kept_bytes``, what a forward leaves for its
    backward, outputs included; and, if an estimate is given, ``memory_peak_of_estimate``, the peak divided by it. A
    warning is logged once if the peak is outside of the tolerance. The first step, which has no optimizer states yet,
    is not compared.

    Args:
        every: Sample one step in so many. By default: on a CUDA device every step, which costs two reads of the
            allocator's statistics and resets their peak; on a CPU only the second step, because torch's profiler,
            which traces the allocations, makes a step slow. A step in which another profiler runs is left out.
        estimate: The result of `estimate(...)` for this model, batch, and optimizer.
        tolerance: The share by which the peak may exceed the estimate, or fall below the estimate without gradients
            (a Trainer frees gradients between steps).

    Raises:
        ValueError: ``every`` is below 1, or the tolerance is not positive.
    """

    def __init__(self, *, every: int | None = None, estimate: Estimate | None = None, tolerance: float = 0.1) -> None:
        if every is not None and every < 1:
            raise ValueError(f"every has to be 1 or more, got {every}")
        if tolerance <= 0:
            raise ValueError(f"tolerance has to be positive, got {tolerance}")
        self.every, self.estimate, self.tolerance = every, estimate, tolerance
        self._reset()

    def _reset(self) -> None:
        self._first_step = 0
        self._measures = False
        self._sampling = self._warned = False
        self._hooks: list[RemovableHandle] = []
        self._profiler: Any = None
        self._before_step = self._before_forward = self._kept = 0
        self._pending: dict[str, float] = {}

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go before the trackers, which read a log entry in the order of the callbacks."""
        self._go_first()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Start measuring. Raises MeasurementError on a device whose memory cannot be measured."""
        self._go_first()
        self._end()
        self._reset()
        if not self._wanted(args.device):
            return
        self._measures, self._first_step = True, state.global_step
        # a hook would break the graph of torch.compile
        compiled = args.torch_compile or model is None or compiled_modules(model)
        if args.device.type == "cuda" and not compiled:
            self._hooks = [
                model.register_forward_pre_hook(lambda *_: self._forward_begins(args.device)),
                model.register_forward_hook(lambda *_: self._forward_ends(args.device)),
            ]

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Start sampling before the first forward of a step."""
        self._sampling = self._is_sampled(state.global_step - self._first_step, args.device.type)
        if not self._sampling:
            return
        self._kept = 0
        if args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(args.device)
        else:
            self._before_step = resident_bytes(model, optimizer)
            self._profiler = memory_profiler()
            self._profiler.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the sampled figures after the optimizer's step."""
        if not self._sampling:
            return
        self._sampling = False
        if args.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(args.device)
        else:
            self._profiler.stop()
            seen = timeline_of(self._profiler, "cpu")
            self._profiler = None
            peak, self._kept = self._before_step + seen.peak_bytes, seen.kept_bytes
        self._note(PEAK, peak)
        # kept bytes are not measured under torch.compile
        if self._kept:
            self._note(KEPT, self._kept)
        # the Trainer has already counted this step
        if self.estimate is not None and state.global_step - self._first_step > 1:
            self._compare(peak, self.estimate)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the figures to the entry of the training loss, and not to those of evaluations."""
        if logs is None or "loss" not in logs or not self._pending:
            return
        logs.update(self._pending)
        # the history has its own copy of the entry
        state.log_history[-1].update(self._pending)
        self._pending = {}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the hooks."""
        self._end()

    def _wanted(self, device: torch.device) -> bool:
        """Whether this callback measures."""
        if device.type not in MEASURED:
            raise MeasurementError(f"the Trainer is on {device}; memory can be logged on a CPU or a CUDA device")
        return True

    def _go_first(self) -> None:
        if (handler := handler_above()) is not None and self in handler.callbacks:
            handler.callbacks.remove(self)
            handler.callbacks.insert(0, self)

    def _is_sampled(self, step: int, device: str) -> bool:
        if not self._measures or device == "cpu" and profiler_runs():
            return False
        if self.every is None:
            return device == "cuda" or step == 1
        return step % self.every == 0

    def _forward_begins(self, device: torch.device) -> None:
        if self._sampling:
            self._before_forward = torch.cuda.memory_allocated(device)

    def _forward_ends(self, device: torch.device) -> None:
        if self._sampling:
            self._kept = max(self._kept, torch.cuda.memory_allocated(device) - self._before_forward)

    def _note(self, key: str, value: float) -> None:
        self._pending[key] = max(self._pending.get(key, value), value)

    def _compare(self, peak: int, estimate: Estimate) -> None:
        ratio = peak / estimate.total_peak_bytes
        self._note(RATIO, ratio)
        # the estimate has all gradients at the peak; a Trainer without accumulation frees them between steps
        lowest = (1 - self.tolerance) * (estimate.total_peak_bytes - estimate.gradients_bytes)
        if lowest <= peak <= (1 + self.tolerance) * estimate.total_peak_bytes or self._warned:
            return
        self._warned = True
        logger.warning(
            "the peak of a step is %s, %.0f%% of the %s that were estimated for batch size %d and length %d",
            readable_size(peak),
            100 * ratio,
            readable_size(estimate.total_peak_bytes),
            estimate.batch_size,
            estimate.seq_len,
        )

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        # a run was interrupted in a sampled step
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None


def handler_above() -> CallbackHandler | None:
    """The handler that has called an event of a callback, which gets no other way to the Trainer; None without one."""
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, CallbackHandler):
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    return None
