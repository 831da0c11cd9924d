"""Patched PEFT layers. The cast of an adapter's input is declared as derived; all adapters on one input share it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .. import compilation, ops
from ..ops.autocast import autocast_dtype
from ..ops.snapshot import refuse_merges
from .adapted_weights import adapts_a_weight, weights_declared
from .base import ModuleMixin, recording


class AdapterMixin(ModuleMixin):
    """Any `BaseTunerLayer`. The mixin changes how its input is cast, and nothing else."""

    # PEFT asks for the class of a layer by its name ("ParamWrapper")
    prefix = ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if compilation.is_traced():
            return super().forward(*args, **kwargs)
        adapts = adapts_a_weight(self)
        with weights_declared(self._modules["base_layer"]) if adapts else nullcontext():
            out = super().forward(*args, **kwargs)
        # an adapted parameter is recomputed in backward, and under autocast the casts of weights
        if adapts or (args and isinstance(args[0], Tensor) and autocast_dtype(args[0]) is not None):
            refuse_merges([self], out)
        return out

    def _cast_input_dtype(self, x: Any, dtype: torch.dtype) -> Any:
        cast_enabled = getattr(self, "cast_input_dtype_enabled", True)
        # below the first trainable layer x needs no gradient, but the adapters' weights need x
        settings = self.actcompress
        eager = not compilation.is_traced()
        if settings is None or not isinstance(x, Tensor) or not cast_enabled or not eager or not recording(x):
            return super()._cast_input_dtype(x, dtype)  # type: ignore[misc]
        return ops.cast(x, dtype, codec=settings.codec)
