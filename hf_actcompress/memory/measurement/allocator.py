"""The bytes that a call holds and its peak bytes, counted from the allocator's own allocations and frees.

On a CPU the events come from `torch.profiler`, deterministic to the byte. On CUDA they come from the caching
allocator's statistics, which round every block up to 512 bytes.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ...errors import MeasurementError
from ...garbage import without_collections
from ...private_apis import ProfilerEvent

# without this the profiler prints its start and end to stderr; it reads the variable when it is first used
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

# the first part of the names that the profiler gives to the runs of autograd's engine and of an optimizer
BACKWARD, OPTIMIZER = "autograd::engine::evaluate_function", "Optimizer.step#"


@dataclass(frozen=True)
class AllocatorTrace:
    """The allocator during one call.

    Args:
        net_bytes: Allocated minus freed again: what the call still holds.
        peak_bytes: The highest running sum, i.e. what was held at once.
        events: How many allocations and frees there were.
    """

    net_bytes: int
    peak_bytes: int
    events: int


@dataclass(frozen=True)
class StepMemory:
    """Memory of one training step above what was allocated before it.

    Args:
        peak_bytes: The highest point: what decides whether the step fits.
        left_bytes: What the step leaves behind (gradients that did not exist before, cached tensors).
    """

    peak_bytes: int
    left_bytes: int


def allocator_trace(fn: Callable[[], Any]) -> AllocatorTrace:
    """Run `fn` once and read the CPU allocator's events in time order.

    The result of `fn` is held until the count is complete. Garbage is collected before the call, and again after it
    while events are still counted, so that reference cycles do not count as held. Blocks that were allocated before the
    call are left out: the profiler does not report their frees reliably.

    Raises:
        MeasurementError: This torch reports no allocator events, or not in a form that is known here.
    """
    with collected(), memory_profiler() as profiler:
        held = fn()
        gc.collect()
    del held
    sums = list(running_sums(allocator_events(profiler)[0]))
    return AllocatorTrace(sums[-1] if sums else 0, max(sums, default=0), len(sums))


def memory_profiler() -> Any:
    """A profiler that sees allocations on every device."""
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


@contextmanager
def collected() -> Iterator[None]:
    """Garbage is collected before the block runs, and the interpreter collects none while it runs."""
    gc.collect()
    with without_collections():
        yield


# (time in ns, address, signed size)
Allocation = tuple[int, int, int]
# (name, start in ns, end in ns)
Span = tuple[str, int, int]


def allocator_events(profiler: Any, kind: str = "cpu") -> tuple[list[Allocation], list[Span]]:
    """What a finished `torch.profiler.profile` with ``profile_memory`` saw, in time order.

    Args:
        profiler: The profiler.
        kind: The kind of device whose allocator is read: "cpu" or "cuda".

    Returns:
        Its allocations and frees, and the spans in which autograd's engine or an optimizer ran.

    Raises:
        MeasurementError: This torch reports no such events, or not in a form that is known here.
    """
    allocations: list[Allocation] = []
    spans: list[Span] = []
    try:
        # the flat list of events has no addresses, and `profile.events()` folds allocations into their operators
        pending = list(profiler.profiler.kineto_results.experimental_event_tree())
        while pending:
            event = pending.pop()
            pending.extend(event.children)
            if event.tag == ProfilerEvent.Allocation:
                if event.extra_fields.device.type == kind:
                    allocations.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
            elif event.name.startswith((BACKWARD, OPTIMIZER)):
                spans.append((event.name, event.start_time_ns, event.end_time_ns))
    except (AttributeError, TypeError) as error:
        raise MeasurementError(
            f"torch {torch.__version__} does not give its profiler's memory events in the form that is read here "
            f"({error}); tested with torch 2.11 to 2.13"
        ) from error
    return sorted(allocations, key=lambda event: event[0]), sorted(spans, key=lambda span: span[1])


def running_sums(allocations: list[Allocation]) -> Iterator[int]:
    """Bytes that are held after each event, in blocks that were allocated during the trace."""
    net = 0
    live: dict[int, int] = {}
    for _, address, size in allocations:
        if size > 0:
            live[address] = size
            net += size
        else:
            # The free of a block that is older than this trace is never counted: torch's profiler remembers sizes by
            # address across traces, so it reports such a free with an earlier trace's size, or does not report it.
            net -= live.pop(address, 0)
        yield net


def measure_step(step: Callable[[], object], device: torch.device | str) -> StepMemory:
    """Memory of one step (forward and backward, perhaps the optimizer) above what is allocated before it.

    Args:
        step: Runs the step once. For a figure of activations alone, run it once before, so that the gradients exist.
        device: The model's device: a CPU or a CUDA device.

    Returns:
        Its peak and what it leaves behind, in bytes.

    Raises:
        MeasurementError: Another kind of device, or no allocator events.
    """
    device = measurable(device)
    if device.type == "cpu":
        seen = allocator_trace(lambda: _drop(step()))
        return StepMemory(seen.peak_bytes, seen.net_bytes)
    with _cuda_start(device) as before:
        _drop(step())
        peak = torch.cuda.max_memory_allocated(device) - before
        gc.collect()
        return StepMemory(peak, torch.cuda.memory_allocated(device) - before)


def kept_bytes(forward: Callable[[], Any], device: torch.device | str) -> int:
    """Bytes held after a forward while its loss is held: what is kept for backward.

    Args:
        forward: Runs the forward once and returns the loss, or an output with a ``loss``. Only the loss is held on
            to: logits and hidden states are counted only if backward needs them.
        device: The model's device: a CPU or a CUDA device.

    Returns:
        Bytes above what was allocated before: no weights, gradients or optimizer state, unless the forward makes them.

    Raises:
        MeasurementError: Another kind of device, no allocator events, or an output without a loss.
    """
    device = measurable(device)
    if device.type == "cpu":
        return allocator_trace(lambda: loss_of(forward())).net_bytes
    with _cuda_start(device) as before:
        held = loss_of(forward())
        gc.collect()
        kept = torch.cuda.memory_allocated(device) - before
        del held
        return kept


def measurable(device: torch.device | str) -> torch.device:
    """The device. Raises MeasurementError for one that is neither a CPU nor a CUDA device."""
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise MeasurementError(f"memory was asked for on {device}; it can be measured on a CPU or a CUDA device")
    return device


def _drop(_: object) -> None:
    return None


def loss_of(output: Any) -> Tensor:
    """The loss in what a forward returned. Raises MeasurementError if there is none."""
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise MeasurementError(
            f"the forward returned {type(output).__name__} without a loss; pass labels, or return the loss itself"
        )
    return loss


@contextmanager
def _cuda_start(device: torch.device) -> Iterator[int]:
    with collected():
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield torch.cuda.memory_allocated(device)
