"""What a training loop needs beside `patch_model`: callbacks of the Trainer and a cache.

To import it gives transformers the name "actcompress" for `TrainingArguments(report_to=...)`.
"""

from __future__ import annotations

from transformers.integrations import INTEGRATION_TO_CALLBACK

from .callback import ActCompressCallback
from .gradient_norms import GradientNorms
from .memory_callback import MemoryCallback

__all__ = ["ActCompressCallback", "GradientNorms", "MemoryCallback"]

# a Trainer makes a callback of the class of each name that it is asked for, and of no other
INTEGRATION_TO_CALLBACK.setdefault("actcompress", ActCompressCallback)
