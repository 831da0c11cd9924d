"""What a training loop needs of us beyond `patch_model`: the Trainer callbacks, a cache."""

from __future__ import annotations

from .callback import ActCompressCallback
from .gradient_norms import GradientNorms
from .memory_callback import MemoryCallback, log_memory

__all__ = ["ActCompressCallback", "GradientNorms", "MemoryCallback", "log_memory"]
