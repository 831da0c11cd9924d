"""Patched BatchNorms: stock's code runs, and the output is known to be recomputed from the input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from .. import compilation
from ..ops import layer_calls
from ..records import declare, stored_exact, whole_record_of
from .base import ModuleMixin, is_sharded, keeps_for_backward, only_tensor


class BatchNormMixin(ModuleMixin):
    """torch's BatchNorm. Stock's code runs and keeps its input; the output is declared as derived from that input."""

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    momentum: float | None
    eps: float

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if compilation.is_traced_plan():
            return self._in_plan(*args, **kwargs)
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

    def _in_plan(self, *args: Any, **kwargs: Any) -> Any:
        """In the trace of a plan, whose graph counts no batches: each later call of the layer does (`BatchCount`)."""
        count = self.num_batches_tracked
        if not self.training or count is None:
            return super().forward(*args, **kwargs)
        if self.momentum is None:
            raise NotImplementedError("a BatchNorm averages over all batches")
        layer_calls.calls_so_far().append(BatchCount(vars(self)[layer_calls.PATH]))
        self.num_batches_tracked = None
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.num_batches_tracked = count


@dataclass(frozen=True)
class BatchCount:
    """A call of a BatchNorm in a layer's code. Its one effect outside of the graph is that it counts the batch.

    Attributes:
        path: The BatchNorm, by its name in the layer.
    """

    path: str

    def of(self, module: Any, given: Mapping[str, Sequence[Any]], runs_again: bool) -> None:
        """Count the batch in one call of the layer, whose BatchNorm is `module`."""
        module.num_batches_tracked.add_(1)

    def why_not_again(self, again: bool) -> str:
        return "torch's checkpointing updates the statistics of its BatchNorm twice, and a plan would do it once"


def _normed(eps: float, running: bool, affine: bool, x: Tensor, *sources: Tensor) -> Tensor:
    """A BatchNorm's output, recomputed. It updates no running statistics."""
    mean, var = sources[:2] if running else (None, None)
    weight, bias = sources[-2:] if affine else (None, None)
    return nn.functional.batch_norm(x, mean, var, weight, bias, not running, 0.0, eps)
