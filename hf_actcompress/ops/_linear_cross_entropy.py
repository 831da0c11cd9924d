"""Cross entropy of a linear head that keeps nothing of vocabulary size beyond a stated budget.

torch has `torch.nn.functional.linear_cross_entropy` from 2.13 on, and it is not used here: with reduction "mean" it
makes the weight's gradient in forward and keeps it, and with "none" its bf16 gradients err by more than the exactness
law allows (tests/ops/test_torch_linear_cross_entropy.py measures both and fails once they no longer hold). It supports
neither autocast (a cast weight would be kept) nor a softcap.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from ..dispatch import implementation
from ..records import (
    Record,
    applied,
    as_stock_saves,
    declare,
    is_dropped,
    is_lossless,
    load,
    parameter,
    record_of,
    save,
    stored_exact,
)
from ..reference.device_rules import on_cpu
from ..reference.linear_cross_entropy import NO_TARGET, head_logits
from ..reference.logits_chunks import KEPT_BYTES, Pointwise, are_kept
from ._cast import cast_record
from .autocast import autocast_dtype
from .deferred_values import is_cast
from .first_order import once_differentiable
from .loss_arguments import loss_dtypes, reduced

_Grads = tuple[Tensor | None, Tensor | None, Tensor | None, *tuple[None, ...]]


class HeadWay(StrEnum):
    """What a head computes in its forward for its backward."""

    # nothing: backward makes the logits again, the fourth product of vocabulary size
    AGAIN = "again"
    # the logits, which are kept as they are
    KEPT = "kept"
    # the gradient of the hidden states; there is no other one
    GRADIENT = "gradient"


def _way(h: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, budget: int) -> HeadWay:
    """By shapes and dtypes, never by free memory."""
    if not torch.is_grad_enabled():
        return HeadWay.AGAIN
    if not weight.requires_grad and (bias is None or not bias.requires_grad):
        # in fp16 the gradient of a loss that a GradScaler has not scaled yet may underflow
        return HeadWay.GRADIENT if h.requires_grad and dtype != torch.float16 else HeadWay.AGAIN
    kept = are_kept(h.size(0), h.size(1), weight.size(0), dtype.itemsize, budget)
    return HeadWay.KEPT if kept else HeadWay.AGAIN


class LinearCrossEntropyFunction(torch.autograd.Function):
    """Losses per row. What it keeps depends on the way: see `linear_cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        logits: Tensor | None,
        rows: Tensor | None,
        pointwise: Pointwise,
        dtype: torch.dtype,
        loss_dtypes: tuple[torch.dtype, torch.dtype],
        way: HeadWay,
        scale: Tensor | None,
    ) -> Tensor:  # h [K, D], weight [V, D], bias [V], target [K], logits [M, V], rows [K]
        kept = None
        with torch.autocast(h.device.type, enabled=False):
            x = h.to(dtype)
            if way is HeadWay.KEPT:
                logits = kept = head_logits(x, weight.to(dtype), bias.to(dtype) if bias is not None else None)
            losses, maximum, log_sum, dh = implementation("linear_cross_entropy_fwd", h)(
                x, weight, bias, target, pointwise, loss_dtypes[0], logits, None if kept is not None else rows,
                scale,
            )  # fmt: skip
        ctx.pointwise, ctx.h_dtype, ctx.way = pointwise, h.dtype, way
        if scale is not None:
            save(ctx, stored_exact(dh), stored_exact(scale))
            return losses.to(loss_dtypes[1])  # type: ignore[no-any-return]
        bias_record = parameter(bias) if bias is not None else None
        rows_record = stored_exact(rows) if rows is not None else None
        record = exact_record(h, dtype)
        if is_dropped(record):
            # backward reads dropped padding rows as zeros, which do not fit their statistics: make their softmax zero
            maximum = maximum.masked_fill(target == NO_TARGET, torch.inf)
        exact = (target, maximum, log_sum)
        kept_record = stored_exact(kept) if kept is not None else None
        save(ctx, record, parameter(weight), bias_record, *map(stored_exact, exact), rows_record, kept_record)
        return losses.to(loss_dtypes[1])  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses: Tensor) -> _Grads:  # dlosses [K]
        none = (None,) * 8
        if ctx.way is HeadWay.GRADIENT:
            dh, scale = load(ctx, dlosses)
            # 1 if the loss is a mean over the tokens that count, as in most steps: no bit changes then
            factor = dlosses.to(dh.dtype) / scale.to(dh.dtype)
            return (dh * factor[:, None]).to(ctx.h_dtype), None, None, *none
        h, weight, bias, target, maximum, log_sum, _, logits = load(ctx, dlosses, rows=6)
        dh, dweight, dbias = implementation("linear_cross_entropy_bwd", h)(
            dlosses, h, weight, bias, target, maximum, log_sum, ctx.pointwise, ctx.needs_input_grad[:3], logits
        )
        return dh.to(ctx.h_dtype) if dh is not None else None, dweight, dbias, *none


def exact_record(h: Tensor, dtype: torch.dtype) -> Record:
    """The record of ``h.to(dtype)``, exact, so that backward computes the same logits as forward."""
    record = record_of(h) if h.dtype == dtype else cast_record(h, dtype)
    # logits of a rounded h would not fit the kept statistics; one exact tensor per model costs little
    return record if is_lossless(record) else stored_exact(h.detach().to(dtype))


def _select(h: Tensor, rows: Tensor) -> Tensor:
    """Recompute function of a choice of rows."""
    return h.index_select(0, rows)


def _selected(h: Tensor, rows: Tensor | None) -> Tensor:
    """Rows of h [M, D] as a derived tensor [K, D]."""
    if rows is None:
        return h
    selected = _select(h, rows)
    declare(selected, _select, record_of(h), stored_exact(rows))
    return selected


def linear_cross_entropy(
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    rows: Tensor | None = None,
    logits: Tensor | None = None,
    pointwise: Pointwise = (),
    dtype: torch.dtype | None = None,
    most: int | None = None,
    budget: int = KEPT_BYTES,
) -> Tensor:
    """``cross_entropy(pointwise(linear(h, weight, bias))[rows], target)``, a chunk of the logits at a time.

    Args:
        h: ``[..., D]``, floating point; M rows in all.
        weight: ``[V, D]``.
        target: ``[N]`` int64 class indices; rows whose target is ``ignore_index`` cost nothing.
        bias: ``[V]`` or None.
        reduction: "mean", "sum" or "none".
        ignore_index: A target that does not count.
        rows: ``[N]`` int64, the row of h that each target belongs to; None if N is M, in order.
        logits: ``[M, V]``, ``linear(h, weight, bias)`` if the caller has it: the loss is then torch's own on
            these values. Not kept.
        pointwise: What happens to the logits before the loss: differentiable elementwise functions without tensors
            of their own, each applied to every chunk, in forward and in backward.
        dtype: Dtype of the logits; by default the autocast dtype or h's.
        most: The largest number of targets that may count; more are an error on a GPU. None: no limit.
        budget: The bytes of logits that may be kept to backward.

    Returns:
        The loss, or ``[N]`` losses, in the dtype of torch's loss; computed by torch's own ops: bit-equal to
        torch's if `logits` is given, or if the product of a few rows has the bits of that of all rows.

    Saves:
        If weight and bias are frozen: the gradient of h, which the forward makes, 4 bytes per element (not in fp16).
        These are two products of vocabulary size. Otherwise h by its record (nothing if it is derived), weight and bias
        by reference, about 40 bytes per target for any V; and the logits of the targets, if they fit `budget`
        and have at most twice the bytes of the weight's gradient (`logits_chunks.are_kept`): three products. If not,
        backward makes the logits again: four products. Stock: three, and the log-probabilities, 2 or 4 bytes times V
        per target.

    Gradient:
        Exact: each row of the weight's gradient is one dot product over all targets, rounded once; the gradient of h is
        summed in fp32. Softmax and its gradient are in fp32 (fp64 for fp64) for any dtype of the logits.

    Raises:
        IndexError: A target is outside the vocabulary, as in stock. On a GPU the kernel stops, as stock's does.

    On a CPU the rows without a target are left out. On a GPU the host would have to wait for the device to know how
    many such rows there are, so all rows are computed, or `most` rows.
    """
    dtype = dtype or autocast_dtype(h) or h.dtype
    counts = target != ignore_index
    outside = ((target < 0) | (target >= weight.size(0))) & counts
    if on_cpu(target):
        _check(target, outside, weight.size(0))
    kept, wanted = _computed(counts, most), torch.where(counts, target, NO_TARGET)
    if kept is not None:
        rows, wanted = kept if rows is None else rows[kept], wanted[kept]
        outside = outside | (counts.sum() > kept.numel())
    selected = _selected(h.reshape(-1, h.size(-1)), rows)
    # a caller who holds the logits may write on them
    way = _way(selected, weight, bias, dtype, budget if logits is None else 0)
    dtypes = loss_dtypes(h.device, dtype, pointwise)
    scale = _mean_of(counts, dtypes[0]) if way is HeadWay.GRADIENT else None
    options = _without_widening(pointwise, dtype), dtype, dtypes, way, scale
    losses = applied(LinearCrossEntropyFunction, selected, weight, bias, wanted, logits, rows, *options)
    if kept is not None:
        with as_stock_saves():
            losses = losses.new_zeros(target.shape).index_copy(0, kept, losses)
    with torch.autocast(h.device.type, enabled=False):
        return reduced(losses, counts, outside, reduction)


def _mean_of(counts: Tensor, dtype: torch.dtype) -> Tensor:
    """1 / the number [] of rows that count, rounded as in stock's loss. The host does not wait for the device."""
    return counts.sum().clamp_(min=1).to(dtype).reciprocal()


def _without_widening(pointwise: Pointwise, dtype: torch.dtype) -> Pointwise:
    """No functions, if these only cast to fp32: the softmax and its gradient are computed in it anyway.

    A chunk of the logits in 16 bits then becomes its gradient in place, and no copy of it is made.
    """
    widened = dtype != torch.float64 and all(is_cast(function, torch.float32) for function in pointwise)
    return () if widened else tuple(pointwise)


def _check(target: Tensor, outside: Tensor, classes: int) -> None:
    if outside.any():
        raise IndexError(f"Target {int(target[outside][0])} is out of bounds: the head has {classes} classes")


def _computed(counts: Tensor, most: int | None) -> Tensor | None:
    """The numbers [K] of the rows to compute: at least all rows where `counts` [N], bool, is True. None: all rows."""
    if on_cpu(counts):
        # on a CPU the host does not have to wait for this
        kept = counts.nonzero()[:, 0]
    elif most is None or most >= counts.numel():
        return None
    else:
        # the rows that count come first
        kept = counts.logical_not().to(torch.uint8).argsort(stable=True)[:most]
    return kept if kept.numel() < counts.numel() else None
