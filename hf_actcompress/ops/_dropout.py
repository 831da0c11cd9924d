"""Dropout that keeps the generator's state; or the mask, where it is smaller or the state cannot be used again."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..codecs import IDENTITY, Codec
from ..dispatch import implementation
from ..records import applied, declare, load, may_write, record_of, save, stored_exact
from .first_order import once_differentiable


def _rebuild(x: Tensor, state: Tensor, p: float) -> Tensor:
    y: Tensor = implementation("dropout_replay", x)(x, state, p)
    return y


class DropoutFunction(torch.autograd.Function):
    """Variant "rng": keeps the state before the draw; rebuilds mask and output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, codec: Codec) -> Tensor:
        y: Tensor
        y, drawn = implementation("dropout_fwd", x)(x, p)
        state = stored_exact(drawn)
        save(ctx, state)
        if not may_write():
            declare(y, partial(_rebuild, p=p), record_of(x, codec), state)
        ctx.p = p
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (state,) = load(ctx)
        return implementation("dropout_replay", dy)(dy, state, ctx.p), None, None


def dropout(x: Tensor, p: float, *, codec: Codec = IDENTITY) -> Tensor:
    """Dropout with the stock mask: the same seed drops the same elements as an unpatched model.

    Args:
        x: Any shape, contiguous and aligned (``reference.draws_like_any``). For other tensors the caller runs the stock
            op, because a replayed mask depends on the order of the elements and on how a kernel loads them.
        p: Probability of an element to be zeroed, 0 < p <= 1.
        codec: How x is stored if a consumer of the output needs it.

    Returns:
        ``x * mask / (1 - p)``, bit-equal to ``torch.nn.functional.dropout``.

    Saves:
        The default generator's state (5,056 bytes on a CPU; on CUDA seed and offset, 16 bytes on the host), no mask.
        On a CPU, the mask (bool) if it is smaller than the state. While a CUDA graph is captured, the mask in one bit
        per element, because the graph's replays draw at other offsets.

    Gradient:
        Exact, bit-equal to stock.
    """
    return applied(DropoutFunction, x, p, codec)
