"""PEFT's layers: recognised only if PEFT has been imported; their children are ordinary leaves."""

from __future__ import annotations

import sys

from torch import nn

from ..config import CompressionConfig
from ..modules.adapter import AdapterMixin
from ..modules.base import Settings
from .sites import Declined, Site


def find_adapter(module: nn.Module, config: CompressionConfig) -> Site | Declined | None:
    """The site of a PEFT tuner layer that casts its input."""
    peft = sys.modules.get("peft.tuners.tuners_utils")
    if peft is None or not isinstance(module, peft.BaseTunerLayer) or not hasattr(module, "_cast_input_dtype"):
        return None
    return Site(AdapterMixin, Settings("adapter"))
