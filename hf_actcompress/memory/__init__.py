"""How much memory a model takes: measured on the allocator, and attributed to modules and roles."""

from __future__ import annotations

from .allocator import AllocatorTrace, StepMemory, kept_bytes, measure_step, trace

__all__ = [
    "AllocatorTrace",
    "StepMemory",
    "kept_bytes",
    "measure_step",
    "trace",
]
