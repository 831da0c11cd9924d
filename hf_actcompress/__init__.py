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
    from .quick.preset_lines import PRESET_LINES
    from .reporting import PatchReport, patch_report
    from .training import ActCompressCallback, GradientNorms, MemoryCallback

# A list for each module: type checkers read the lists, and `_HOME` notes which module each name comes from.
__all__ = ["ActCompressError"]
_HOME = dict.fromkeys(__all__, "errors")
__all__ += ["PRESETS", "CompressionConfig"]
_HOME |= dict.fromkeys(__all__[len(_HOME) :], "config")
__all__ += ["PRESET_LINES"]
_HOME |= dict.fromkeys(__all__[len(_HOME) :], "quick.preset_lines")
__all__ += ["patch_model", "patched", "unpatch_model"]
_HOME |= dict.fromkeys(__all__[len(_HOME) :], "patching")
__all__ += ["PatchReport", "patch_report"]
_HOME |= dict.fromkeys(__all__[len(_HOME) :], "reporting")
__all__ += [
    "BatchSizeReport",
    "Calibration",
    "Estimate",
    "FidelityComparison",
    "FidelityReport",
    "MemoryReport",
    "MemoryTimeline",
    "Plan",
    "StepMemory",
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
_HOME |= dict.fromkeys(__all__[len(_HOME) :], "memory")
__all__ += ["ActCompressCallback", "GradientNorms", "MemoryCallback"]
_HOME |= dict.fromkeys(__all__[len(_HOME) :], "training")


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
