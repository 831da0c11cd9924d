"""What a training loop needs of us beyond `patch_model`: the Trainer callback."""

from __future__ import annotations

from .callback import ActCompressCallback

__all__ = ["ActCompressCallback"]
