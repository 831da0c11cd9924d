"""Gradients that a transform computes for several samples at once: `is_grads_batched`, `torch.func.vmap`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack

_functorch: Any = torch._C._functorch


def is_batched(x: Any) -> bool:
    """Whether a transform gives a tensor as one sample that stands for all samples of a batch."""
    return isinstance(x, Tensor) and bool(_functorch.is_legacy_batchedtensor(x) or _functorch.is_batchedtensor(x))


def samples_in(x: Tensor) -> Tensor:
    """[B, ...]: all samples of a batched tensor."""
    if _functorch.is_batchedtensor(x):
        found: Tensor = _functorch._remove_batch_dim(x, _functorch.maybe_get_level(x), 1, 0)
    else:
        found = torch._remove_batch_dim(x, _legacy_level(), 1, 0)
    return found


def as_batch(samples: Tensor, like: Tensor) -> Tensor:
    """Samples [B, ...] as a batched tensor, in the batch of another one."""
    if _functorch.is_batchedtensor(like):
        found: Tensor = _functorch._add_batch_dim(samples, 0, _functorch.maybe_get_level(like))
    else:
        found = torch._add_batch_dim(samples, 0, _legacy_level())
    return found


@contextmanager
def outside_of_batch(x: Tensor) -> Iterator[None]:
    """A context in which the transform that has made x is not on: in a transform, nothing may draw random numbers."""
    if _functorch.is_batchedtensor(x):
        with temporarily_pop_interpreter_stack():
            yield
        return
    torch._C._vmapmode_decrement_nesting()
    try:
        yield
    finally:
        torch._C._vmapmode_increment_nesting()


def _legacy_level() -> int:
    """The number of the innermost transform of `is_grads_batched`."""
    level: int = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    return level - 1
