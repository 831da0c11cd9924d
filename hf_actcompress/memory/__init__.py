"""How much memory a model takes: measured on the allocator, and attributed to modules and roles."""

from __future__ import annotations

from .allocator import AllocatorTrace, StepMemory, kept_bytes, measure_step, trace
from .attribution import memory_report
from .batch_size import find_batch_size
from .batch_size_report import BatchSizeReport, BatchSizeTrial
from .calibration import Calibration, CalibrationRow, calibrate
from .estimate import Estimate, estimate
from .fidelity import FidelityComparison, FidelityReport, ParameterFidelity, compare_presets, fidelity_report
from .largest import max_batch_size, max_seq_len
from .plan import Plan, PlanRow, plan
from .report import Advice, MemoryReport, MemoryRow
from .timeline import MemoryTimeline, memory_timeline

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
    "calibrate",
    "compare_presets",
    "estimate",
    "fidelity_report",
    "find_batch_size",
    "kept_bytes",
    "max_batch_size",
    "max_seq_len",
    "measure_step",
    "memory_report",
    "memory_timeline",
    "plan",
    "trace",
]
