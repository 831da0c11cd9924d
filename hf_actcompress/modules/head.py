"""The patched language-modelling head: a linear layer whose output is deferred while a loss is being computed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from .. import ops
from ..ops.autocast import autocast_dtype
from .base import keeps_for_backward
from .leaves import LinearMixin


class _Scope(threading.local):
    """The heads that may defer their output in the forward in progress: none outside such a forward."""

    def __init__(self) -> None:
        self.heads: tuple[HeadMixin, ...] = ()


_scope = _Scope()


@contextmanager
def deferring(heads: tuple[HeadMixin, ...]) -> Iterator[None]:
    """While the block runs in this thread, these heads and no others return deferred logits."""
    before = _scope.heads
    _scope.heads = heads
    try:
        yield
    finally:
        _scope.heads = before


class HeadMixin(LinearMixin):
    """nn.Linear whose output are the logits; variant "logits" or "no_logits". Elsewhere a patched linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        if any(head is self for head in _scope.heads) and self._fits(x):
            return ops.deferred_linear(x, self.weight, self.bias, keep_logits=self.actcompress.variant == "logits")
        return super().forward(x)

    def _fits(self, x: Tensor) -> bool:
        """Whether stock would compute logits of it: what it would refuse, it shall refuse."""
        same = x.dtype == self.weight.dtype or autocast_dtype(x) is not None
        plain = x.dim() > 1 and x.numel() > 0 and x.device == self.weight.device and x.size(-1) == self.weight.size(1)
        return same and plain and keeps_for_backward(x, self.weight, self.bias)
