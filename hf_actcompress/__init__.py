"""Fine-tune HuggingFace Transformers with a fraction of the activation memory and exact gradients."""

from __future__ import annotations

from .config import PRESETS, CompressionConfig
from .errors import ActCompressError
from .patching import PatchReport, patch_model, patch_report, patched, unpatch_model

__all__ = [
    "PRESETS",
    "ActCompressError",
    "CompressionConfig",
    "PatchReport",
    "patch_model",
    "patch_report",
    "patched",
    "unpatch_model",
]
