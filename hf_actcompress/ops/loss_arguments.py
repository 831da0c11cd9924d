"""The arguments of torch's losses over classes, read once for all that stand in for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .deferred_logits import DeferredLogits


@dataclass(frozen=True)
class LossArguments:
    """What `torch.nn.functional.cross_entropy` or `nll_loss` was asked for."""

    input: DeferredLogits  # [N, V]
    target: Tensor  # [N], int64
    ignore_index: int
    reduction: str
    label_smoothing: float


def loss_over_classes(loss: Callable[[LossArguments], Any]) -> Callable[..., Any]:
    """Gives `loss` the signature of torch's; NotImplemented where the call is not one of class indices [N] on [N, V].

    Class weights and the options that torch has deprecated (`size_average`, `reduce`) are torch's own.
    """

    def of(
        input: Any,
        target: Any,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        if any(option is not None for option in (weight, size_average, reduce)) or not _class_indices(input, target):
            return NotImplemented
        return loss(LossArguments(input, target, ignore_index, reduction, label_smoothing))

    return of


def _class_indices(input: Any, target: Any) -> bool:
    if not isinstance(input, DeferredLogits) or not isinstance(target, Tensor) or input.chain.written():
        return False
    known = target.dtype == torch.int64 and target.device == input.device
    return known and input.dim() == 2 and target.shape == input.shape[:1] and target.numel() > 0
