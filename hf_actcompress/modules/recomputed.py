"""Patched modules that are a cheap function of one tensor and some vectors: they keep their input and run again."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from .. import compilation, ops
from ..records import declare, stored_exact, whole_record_of
from .base import ModuleMixin, code_of, is_sharded, keeps_for_backward, only_tensor


class RecomputedMixin(ModuleMixin):
    """A norm or an activation of a model's own making."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x, settings = only_tensor(args, kwargs), self.actcompress
        if compilation.is_traced() and settings is not None and x is not None and x.requires_grad:
            return super().forward(compilation.offer(x, settings.codec_name))
        if x is None or settings is None or compilation.is_traced() or is_sharded(self):
            return super().forward(*args, **kwargs)
        own = ops.Snapshot(self, code_of, buffers=True)
        if not own.is_closed or not x.is_floating_point() or not x.numel() or not keeps_for_backward(x, *own.tensors):
            return super().forward(*args, **kwargs)
        return ops.recomputed(x, self.stock_forward(), own, codec=settings.codec)


class BatchNormMixin(ModuleMixin):
    """torch's BatchNorm. Stock's code runs and keeps its input; the output is declared as derived from that input."""

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    eps: float

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        y = super().forward(*args, **kwargs)
        x, settings = only_tensor(args, kwargs), self.actcompress
        plain = x is not None and settings is not None and not compilation.is_traced()
        if plain and keeps_for_backward(x, self.weight, self.bias) and not is_sharded(self):
            assert x is not None
            batch = self.training or self.running_mean is None
            statistics = () if batch else (self.running_mean, self.running_var)
            affine = (self.weight, self.bias) if self.weight is not None else ()
            made = partial(_normed, self.eps, bool(statistics), bool(affine))
            declare(y, made, whole_record_of(x), *(stored_exact(t) for t in (*statistics, *affine) if t is not None))
        return y


def _normed(eps: float, running: bool, affine: bool, x: Tensor, *sources: Tensor) -> Tensor:
    """A BatchNorm's output, recomputed. It updates no running statistics."""
    mean, var = sources[:2] if running else (None, None)
    weight, bias = sources[-2:] if affine else (None, None)
    return nn.functional.batch_norm(x, mean, var, weight, bias, not running, 0.0, eps)
