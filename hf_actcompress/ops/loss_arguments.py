"""The arguments of torch's losses over classes, read once for all functions that replace them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..private_apis import without_torch_function
from ..records import as_stock_saves
from ..reference.device_rules import on_cpu
from ..reference.logits_chunks import Pointwise
from .autocast import autocast_on
from .deferred_logits import DeferredLogits

# marks a row that does not count, in `reduced`. The caller's `ignore_index` may be 0, which is a class there
_IGNORED = -100


@dataclass(frozen=True)
class LossArguments:
    """The arguments of a call of `torch.nn.functional.cross_entropy` or `nll_loss`."""

    input: DeferredLogits  # [N, V]
    target: Tensor  # [N], int64
    ignore_index: int
    reduction: str
    label_smoothing: float


def loss_over_classes(loss: Callable[[LossArguments], Any]) -> Callable[..., Any]:
    """Gives `loss` torch's signature. A call returns NotImplemented unless it has class indices [N] for rows [N, V].

    Calls with class weights or with options that torch has deprecated (`size_average`, `reduce`) are left to torch.
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
    with without_torch_function():
        known = target.dtype == torch.int64 and target.device == input.device
        return known and input.dim() == 2 and target.shape == input.shape[:1] and target.numel() > 0


def loss_dtypes(device: torch.device, dtype: torch.dtype, pointwise: Pointwise = ()) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes in which torch computes log-probabilities and the loss of such logits under the current autocast.

    A small call finds the loss's. A CPU's autocast casts the logits; a CUDA device's casts the log-probabilities, which
    it computes in the logits' dtype.
    """
    if pointwise:
        with torch.no_grad():
            x = torch.zeros(1, 1, dtype=dtype, device=device)
            for function in pointwise:
                x = function(x)
        dtype = x.dtype
    return _loss_dtypes(device, dtype, autocast_on(device.type))


@cache
def _loss_dtypes(
    device: torch.device, dtype: torch.dtype, autocast: torch.dtype | None
) -> tuple[torch.dtype, torch.dtype]:
    # `autocast` is the one that is on
    x = torch.zeros(1, 1, dtype=dtype, device=device)
    with torch.no_grad():
        loss = F.cross_entropy(x, torch.zeros(1, dtype=torch.int64, device=device)).dtype
    return (loss if on_cpu(x) else dtype), loss


def reduced(losses: Tensor, counts: Tensor, outside: Tensor | None, reduction: str) -> Tensor:
    """The losses [N] of the rows where `counts` [N], bool, reduced by torch in its order for whole logits [N, V].

    `outside` [N], bool, marks targets outside the vocabulary. They get a class index that is out of range here, too, so
    torch raises: on a GPU in its kernel, without the host waiting for it.
    """
    place = torch.where(counts, 0 if outside is None else outside.long(), _IGNORED)
    with as_stock_saves():
        return F.nll_loss(-losses[:, None], place, ignore_index=_IGNORED, reduction=reduction)
