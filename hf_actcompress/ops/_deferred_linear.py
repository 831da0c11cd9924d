"""A linear layer whose output is computed only when its values are needed.

A cross entropy of this output, in the forward of the model that called the layer, runs as `linear_cross_entropy`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..records import applied
from ..reference.logits_chunks import KEPT_BYTES
from ._linear import LinearFunction, keep_operands, product
from ._linear_cross_entropy import linear_cross_entropy
from .autocast import autocast_dtype
from .deferred_logits import DeferredLogits
from .deferred_values import LogitsSource, Values
from .loss_arguments import LossArguments, loss_over_classes


class LinearSource(LogitsSource):
    """One call of the linear layer."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, keep_logits: bool, targets: float, budget: int
    ) -> None:
        super().__init__(hidden.device)
        self.hidden, self.weight, self.bias, self.keep_logits = hidden, weight, bias, keep_logits
        self.targets, self.budget = targets, budget
        self.dtype = autocast_dtype(hidden) or hidden.dtype

    def logits(self) -> Tensor:
        hidden, weight = self.hidden.detach().to(self.dtype), self.weight.detach().to(self.dtype)
        bias = self.bias.detach().to(self.dtype) if self.bias is not None else None
        with torch.autocast(hidden.device.type, enabled=False):
            return product(hidden, weight, bias, False, trained=self.weight.requires_grad)

    def function(self, func: Any) -> Callable[..., Any] | None:
        return _cross_entropy if func is F.cross_entropy else None


@loss_over_classes
def _cross_entropy(asked: LossArguments) -> Any:
    """What runs instead of `torch.nn.functional.cross_entropy` of deferred logits."""
    if asked.label_smoothing != 0.0:
        return NotImplemented
    input = asked.input
    head = input.chain.source
    assert isinstance(head, LinearSource)
    return linear_cross_entropy(
        head.hidden,
        head.weight,
        asked.target,
        head.bias,
        reduction=asked.reduction,
        ignore_index=asked.ignore_index,
        rows=input.rows.view(-1) if input.rows is not None else None,
        logits=input.chain.root().get().flatten(0, -2) if head.keep_logits else None,
        pointwise=input.pointwise,
        dtype=head.dtype,
        # the share holds for training batches only
        most=math.ceil(head.targets * asked.target.numel()) if torch.is_grad_enabled() else None,
        budget=head.budget,
    )


class DeferredLinearFunction(LinearFunction):
    """`LinearFunction` that does not compute its output."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, keep_logits: bool, targets: float, budget: int
    ) -> Tensor:  # x [..., D], weight [V, D], bias [V]
        head = LinearSource(x, weight, bias, keep_logits, targets, budget)
        keep_operands(ctx, x, weight, bias)
        shape = (*x.shape[:-1], weight.size(0))
        return DeferredLogits(Values(head), torch.empty(shape, dtype=head.dtype, device="meta"))


def deferred_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    keep_logits: bool = True,
    targets: float = 1.0,
    budget: int = KEPT_BYTES,
) -> Tensor:
    """Linear layer whose output is computed when something needs its values.

    Args:
        x: ``[..., D]``, floating point.
        weight: ``[V, D]``.
        bias: ``[V]`` or None.
        keep_logits: Whether the values will be needed in the end (`plain`): a loss is then computed from them,
            bit-equal to stock's. False: a loss computes the logits in chunks.
        targets: The largest share of a loss's targets that may count. A GPU computes that share of the rows.
        budget: The bytes of logits that a loss may keep to backward.

    Returns:
        DeferredLogits ``[..., V]``. Row selections and scalar functions of it stay deferred; `cross_entropy` of it is
        `linear_cross_entropy`; any other op runs on its values. `returned_logits` turns it into logits that may leave
        the forward.

    Saves:
        As `linear`, and only while a tensor that was computed from the values is alive.

    Gradient:
        Exact.
    """
    return applied(DeferredLinearFunction, x, weight, bias, keep_logits, targets, budget)
