"""`find_batch_size`: the largest batch that trains on this device, in a few trials whose effects are undone."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import MeasurementError, UnsupportedModelError
from ...quick.cards import card_bytes
from ...quick.sizes import readable_size
from ..measurement.allocator import measure_step
from ..measurement.training_restored import collect, resident_bytes, training_restored
from .report import BatchSizeReport, BatchSizeTrial
from .search import Search

logger = logging.getLogger(__name__)

# the share of free memory that is used: the caching allocator cannot use the last blocks
_USABLE = 0.95


def find_batch_size(
    model: nn.Module,
    make_batch: Callable[[int], Any],
    step: Callable[[Any], object],
    *,
    optimizer: Any = None,
    start: int = 1,
    largest: int | None = None,
    budget: int | str | None = None,
    trials: int = 4,
    timed_steps: int = 3,
) -> BatchSizeReport:
    """The largest batch size that trains, and the speed of each size that was tried: throughput often has its
    maximum below the largest size.

    Each trial runs a few steps, the first of which makes gradients and optimizer states. A line through the measured
    peaks gives the next candidate, so that few trials run out of memory; the known bounds of what fits correct it.
    Afterwards trainable weights, buffers, gradients, optimizer states, modes and generators are restored from copies in
    host memory. Anything else that `step` changes is left to the caller. Every trial is logged.

    Args:
        model: The model on the device where it trains, patched as for the training; one process, no DDP or FSDP.
        make_batch: Makes a batch of a given size on the model's device, of the longest sequences of the training.
        step: Takes a batch and does a whole training step: forward, backward, `optimizer.step()`, `zero_grad()`.
        optimizer: The optimizer that `step` uses, if any.
        start: The first candidate, such as the result of `max_batch_size`. Starting from 1 takes one trial more.
        largest: The largest size to try.
        budget: Bytes that may be in use on the device in all, or "22GiB", or "rtx4090". On a CUDA device the default
            is what is free. On a CPU it is required, and bytes are counted by the allocator's events, which is slow.
        trials: The most candidates to try.
        timed_steps: How many steps of each candidate are timed; their median counts.

    Returns:
        The trials: `.largest`, `.fastest`, `.print()`, `.to_json()`.

    Raises:
        MeasurementError: There is no budget on a CPU, or the device is neither CPU nor CUDA.
        UnsupportedModelError: There are several processes.
        ValueError: A count is below 1, or the budget is no size.
    """
    search = Search(start, largest, trials)
    if timed_steps < 1:
        raise ValueError(f"timed_steps has to be 1 or more, got {timed_steps}")
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise UnsupportedModelError("find_batch_size runs in one process; call it before torch.distributed starts")
    device = next(model.parameters()).device
    limit, aim = _limits(device, budget)
    with training_restored(model, optimizer) as restore:
        while (batch_size := search.candidate(aim)) is not None:
            base = resident_bytes(model, optimizer)
            trial, state = _try(batch_size, make_batch, step, _Ruler(device, limit, base, timed_steps))
            # a step that ran out of memory may have left anything behind
            restore()
            collect()
            search.add(trial, max(state, base))
            logger.info("%s", trial)
    report = BatchSizeReport(tuple(search.tried), limit, search.settled(aim))
    logger.info("%s", report)
    return report


def _limits(device: torch.device, budget: int | str | None) -> tuple[int, int]:
    """(bytes that may be used, bytes that the search aims at)."""
    given = card_bytes(budget) if budget is not None else None
    if device.type == "cpu":
        if given is None:
            raise MeasurementError('on a CPU nothing runs out of memory in good time; give a budget, such as "8GiB"')
        return given, given
    if device.type != "cuda":
        raise MeasurementError(f"the model is on {device}; batch sizes can be tried on a CPU or a CUDA device")
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    limit = min(given or free, free)
    return limit, min(limit, int(_USABLE * free))


@dataclass(frozen=True)
class _Ruler:
    device: torch.device
    limit: int
    base: int
    timed_steps: int


def _try(
    batch_size: int, make_batch: Callable[[int], Any], step: Callable[[Any], object], ruler: _Ruler
) -> tuple[BatchSizeTrial, int]:
    """The trial, and the bytes that are in use between its steps."""
    reason = ""
    try:
        batch = make_batch(batch_size)
        peak, state = (_peak_on_cuda if ruler.device.type == "cuda" else _peak_on_cpu)(step, batch, ruler)
        if peak > ruler.limit:
            reason = f"its peak of {readable_size(peak)} is above {readable_size(ruler.limit)}"
            return BatchSizeTrial(batch_size, False, peak, reason=reason), state
        seconds = statistics.median(_seconds(step, batch, ruler.device) for _ in range(ruler.timed_steps))
        return BatchSizeTrial(batch_size, True, peak, seconds, _tokens(batch)), state
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
    # outside of the handler the exception is freed, and with it the frames that held the step's tensors
    return BatchSizeTrial(batch_size, False, None, reason=reason), 0


def out_of_memory(error: RuntimeError) -> bool:
    """Whether the error says that memory ran out, on a CUDA device or on the host."""
    texts = ("DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in texts)


def _peak_on_cpu(step: Callable[[Any], object], batch: Any, ruler: _Ruler) -> tuple[int, int]:
    inputs = list(batch.values()) if isinstance(batch, Mapping) else [batch]
    there = ruler.base + sum(x.nbytes for x in inputs if isinstance(x, Tensor))
    peak = 0
    # the second step has gradients and optimizer states from its beginning
    for _ in range(2):
        seen = measure_step(lambda: step(batch), ruler.device)
        peak, there = max(peak, there + seen.peak_bytes), there + seen.left_bytes
    return peak, there


def _peak_on_cuda(step: Callable[[Any], object], batch: Any, ruler: _Ruler) -> tuple[int, int]:
    torch.cuda.reset_peak_memory_stats(ruler.device)
    for _ in range(2):
        step(batch)
    torch.cuda.synchronize(ruler.device)
    return torch.cuda.max_memory_allocated(ruler.device), torch.cuda.memory_allocated(ruler.device)


def _seconds(step: Callable[[Any], object], batch: Any, device: torch.device) -> float:
    start = time.perf_counter()
    step(batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _tokens(batch: Any) -> int | None:
    """The number of tokens that are not padding; None if it is not known."""
    if not isinstance(batch, Mapping):
        return None
    mask, ids = batch.get("attention_mask"), batch.get("input_ids")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return int((mask != 0).sum())
    return ids.numel() if isinstance(ids, Tensor) else None
