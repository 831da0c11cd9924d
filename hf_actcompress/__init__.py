"""Fine-tune HuggingFace Transformers with a fraction of the activation memory and exact gradients.

This file only lists the public names. They are imported on first use, so that the console script starts without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import PRESETS, CompressionConfig
    from .errors import ActCompressError
    from .memory import (
        BatchSizeReport,
        Calibration,
        FidelityComparison,
        FidelityReport,
        MemoryReport,
        MemoryTimeline,
        StepMemory,
        calibrate,
        compare_presets,
        fidelity_report,
        find_batch_size,
        kept_bytes,
        longest_batches,
        measure_step,
        memory_report,
        memory_timeline,
    )
    from .memory.estimation.estimate import Estimate, estimate
    from .memory.estimation.largest import max_batch_size, max_seq_len
    from .memory.planning.plans import Plan, plan
    from .patching import patch_model, patched, unpatch_model
    from .reporting import PatchReport, patch_report
    from .training import ActCompressCallback, GradientNorms, MemoryCallback, log_memory

_HOME = {
    "GradientNorms": "training",
    "plan": "memory",
    "max_seq_len": "memory",
    "max_batch_size": "memory",
    "Plan": "memory",
    "log_memory": "training",
    "MemoryCallback": "training",
    "memory_timeline": "memory",
    "estimate": "memory",
    "MemoryTimeline": "memory",
    "Estimate": "memory",
    "BatchSizeReport": "memory",
    "find_batch_size": "memory",
    "Calibration": "memory",
    "calibrate": "memory",
    "fidelity_report": "memory",
    "compare_presets": "memory",
    "FidelityReport": "memory",
    "FidelityComparison": "memory",
    "ActCompressCallback": "training",
    "ActCompressError": "errors",
    "CompressionConfig": "config",
    "MemoryReport": "memory",
    "PRESETS": "config",
    "PatchReport": "reporting",
    "StepMemory": "memory",
    "kept_bytes": "memory",
    "longest_batches": "memory",
    "measure_step": "memory",
    "memory_report": "memory",
    "patch_model": "patching",
    "patch_report": "reporting",
    "patched": "patching",
    "unpatch_model": "patching",
}

__all__ = [
    "PRESETS",
    "ActCompressCallback",
    "ActCompressError",
    "BatchSizeReport",
    "Calibration",
    "CompressionConfig",
    "Estimate",
    "FidelityComparison",
    "FidelityReport",
    "GradientNorms",
    "MemoryCallback",
    "MemoryReport",
    "MemoryTimeline",
    "PatchReport",
    "Plan",
    "StepMemory",
    "calibrate",
    "compare_presets",
    "estimate",
    "fidelity_report",
    "find_batch_size",
    "kept_bytes",
    "log_memory",
    "longest_batches",
    "max_batch_size",
    "max_seq_len",
    "measure_step",
    "memory_report",
    "memory_timeline",
    "patch_model",
    "patch_report",
    "patched",
    "plan",
    "unpatch_model",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("hf-actcompress")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
