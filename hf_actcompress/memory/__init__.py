"""How much memory a model takes. Each folder answers one question, and its docstring names the entry point.

`measurement`: what a model keeps now. `estimation`: what a training will need. `planning`: how to keep each layer, so
that a training fits. `fidelity`: what a lossy setting costs the gradients. `batch_size`: the largest batch that trains
on this device. `closed_form`: the formula of `estimate --quick`.
"""

from __future__ import annotations

from .batch_size.find import find_batch_size
from .batch_size.longest import longest_batches
from .batch_size.report import BatchSizeReport, BatchSizeTrial
from .estimation.estimate import Estimate, estimate
from .estimation.largest import max_batch_size, max_seq_len
from .fidelity.calibration import Calibration, CalibrationRow, calibrate
from .fidelity.gradient_error import (
    FidelityComparison,
    FidelityReport,
    ParameterFidelity,
    compare_presets,
    fidelity_report,
)
from .measurement.allocator import AllocatorTrace, StepMemory, allocator_trace, kept_bytes, measure_step
from .measurement.memory_report import memory_report
from .measurement.report import Advice, MemoryReport, MemoryRow
from .measurement.timeline import MemoryTimeline, memory_timeline
from .planning.plans import Plan, PlanRow, plan

__all__ = [
    "Advice",
    "AllocatorTrace",
    "BatchSizeReport",
    "BatchSizeTrial",
    "Calibration",
    "CalibrationRow",
    "Estimate",
    "FidelityComparison",
    "FidelityReport",
    "MemoryReport",
    "MemoryRow",
    "MemoryTimeline",
    "ParameterFidelity",
    "Plan",
    "PlanRow",
    "StepMemory",
    "allocator_trace",
    "calibrate",
    "compare_presets",
    "estimate",
    "fidelity_report",
    "find_batch_size",
    "kept_bytes",
    "longest_batches",
    "max_batch_size",
    "max_seq_len",
    "measure_step",
    "memory_report",
    "memory_timeline",
    "plan",
]
