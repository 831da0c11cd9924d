"""What a training loop needs beside `patch_model`: callbacks of the Trainer and a cache."""

from __future__ import annotations

from .callback import ActCompressCallback
from .gradient_norms import GradientNorms
from .memory_callback import MemoryCallback, log_memory

__all__ = ["ActCompressCallback", "GradientNorms", "MemoryCallback", "log_memory"]
