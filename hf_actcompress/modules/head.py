"""The patched language-modelling head: a linear layer that defers its output while a loss is being computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import compilation, ops
from ..compiling import is_compiling
from ..ops.autocast import autocast_dtype
from ..private_apis import innermost_saved_tensor_hooks
from ..reference.logits_chunks import most_kept
from .base import Settings, keeps_for_backward, only_tensor
from .leaves import LinearMixin

# the heads that may defer their output in the forward in progress, and the saved-tensor hooks that it began under;
# outside of a forward there are none
_deferring: ContextVar[tuple[tuple[HeadMixin, ...], Any]] = ContextVar("deferring heads", default=((), None))


@contextmanager
def deferring(heads: tuple[HeadMixin, ...]) -> Iterator[None]:
    """While the block runs in this thread, these heads and no others return deferred logits.

    Not in a region that the model's own code checkpoints: backward runs the region again, outside of this block.
    """
    token = _deferring.set((heads, innermost_saved_tensor_hooks()))
    try:
        yield
    finally:
        _deferring.reset(token)


@dataclass(frozen=True, kw_only=True)
class HeadSettings(Settings):
    """Settings of a head.

    Attributes:
        targets: The largest share of the targets that may count (have a label that is not -100).
        budget: The bytes of logits that a trained head may keep to backward, so that it does not make them again.
    """

    targets: float
    budget: int

    @property
    def reported(self) -> str:
        if not self.budget:
            return self.keeps
        return f"logits<{self.budget >> 20}M" if self.budget >> 20 else f"logits<{self.budget >> 10}K"


class HeadMixin(LinearMixin):
    """nn.Linear whose output are the logits; kind: "logits" if they are returned whole, else "lazy_logits".

    While no loss is being computed it is a patched linear layer.
    """

    actcompress: HeadSettings | None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x, settings = only_tensor(args, kwargs), self.actcompress
        if is_compiling():
            y: Tensor = super().forward(*args, **kwargs)
            if settings is None or not keeps_for_backward(y):
                return y
            # with a gradient of the weight or without: a graph cannot make that of the hidden states in the forward
            vocabulary, hidden = self.weight.shape
            return compilation.recompute(y, most_kept(hidden, vocabulary, y.element_size(), settings.budget))
        if x is None or settings is None or not self._defers():
            return super().forward(*args, **kwargs)
        # read once: a parametrisation computes the weight each time that it is read
        weight, bias = self.weight, self.bias
        if not _fits(x, weight, bias) or (settings.kind == "lazy_logits" and _is_small(x, weight)):
            return super().forward(x)
        return ops.deferred_linear(
            x, weight, bias, keep_logits=settings.kind == "logits", targets=settings.targets, budget=settings.budget
        )

    def _defers(self) -> bool:
        heads, hooks = _deferring.get()
        # the hooks are compared with ==, because those that are methods are new objects each time
        return any(head is self for head in heads) and innermost_saved_tensor_hooks() == hooks


def _is_small(x: Tensor, weight: Tensor) -> bool:
    """Whether an evaluation has logits no larger than the weight. They are returned, whatever becomes of the weight."""
    return not torch.is_grad_enabled() and x.numel() <= weight.size(1) ** 2


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether stock accepts this input. If it does not, the stock code runs and raises its own error."""
    same = x.dtype == weight.dtype or autocast_dtype(x) is not None
    plain = x.dim() > 1 and x.numel() > 0 and x.device == weight.device and x.size(-1) == weight.size(1)
    # of rows that do not lie in a row, stock's product rounds otherwise than one of rows that do
    plain = plain and x.stride(-1) == 1
    return same and plain and (not torch.is_grad_enabled() or keeps_for_backward(x, weight, bias))
