"""How much memory a model takes: measured on the allocator, and attributed to modules and roles."""

from __future__ import annotations

from .allocator import AllocatorTrace, StepMemory, kept_bytes, measure_step, trace
from .attribution import memory_report
from .calibration import Calibration, CalibrationRow, calibrate
from .fidelity import FidelityComparison, FidelityReport, ParameterFidelity, compare_presets, fidelity_report
from .report import Advice, MemoryReport, MemoryRow

__all__ = [
    "Advice",
    "AllocatorTrace",
    "Calibration",
    "CalibrationRow",
    "FidelityComparison",
    "FidelityReport",
    "MemoryReport",
    "MemoryRow",
    "ParameterFidelity",
    "StepMemory",
    "calibrate",
    "compare_presets",
    "fidelity_report",
    "kept_bytes",
    "measure_step",
    "memory_report",
    "trace",
]
