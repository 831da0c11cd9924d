"""What a training loop needs of us beyond `patch_model`: the Trainer callbacks."""

from __future__ import annotations

from .callback import ActCompressCallback
from .memory_callback import MemoryCallback, log_memory

__all__ = ["ActCompressCallback", "MemoryCallback", "log_memory"]
