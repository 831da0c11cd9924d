"""Cross entropy of h W^T + b per row, in chunks: of rows in the forward, of the vocabulary in backward.

`pointwise` are the functions that the model applies to the logits before its loss (a cast to fp32, a softcap).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .device_rules import on_cpu
from .logits_chunks import Pointwise, applied, bounds_of, chunks, row_chunks, row_pieces

Losses = tuple[Tensor, Tensor, Tensor]

# the target's value for a row without a target
NO_TARGET = -1
# from so many rows on, a CPU's product sums in blocks
FEW_ROWS = 16


def _wide(x: Tensor) -> Tensor:
    """x in fp32; fp64 stays."""
    return x.to(_wide_dtype(x))


def _sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype for sums of few numbers: the device's widest one."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _column_sums(dx: Tensor) -> Tensor:
    """The sums of dx's columns: in fp64 on a CPU; in fp32, as in stock, on a device, where for fp64 torch copies dx."""
    return dx.sum(0, dtype=_sum_dtype(dx) if on_cpu(dx) else torch.promote_types(dx.dtype, torch.float32))


def linear_cross_entropy_fwd(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    pointwise: Pointwise,
    dtype: torch.dtype,
    logits: Tensor | None,
    rows: Tensor | None,
    scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Losses [K] in `dtype`, maximum and log of the sum of exponentials [K] of each row, and the gradient of h.

    Args:
        h: ``[K, D]`` in the dtype of the logits.
        weight: ``[V, D]``.
        bias: ``[V]`` or None.
        target: ``[K]`` int64, `NO_TARGET` for a row without a target.
        pointwise: Applied to each chunk.
        dtype: The dtype in which torch's log_softmax computes the losses.
        logits: ``[M, V]`` as the head made them, if they exist.
        rows: ``[K]`` int64, the rows of `logits`; None for all.
        scale: ``[]``, by which the gradient [K, D] of the sum of all losses is multiplied. It is computed in fp32 (fp64
            for fp64). None: no gradient.
    """
    return by_rows_fwd(_row_statistics, _softmax_grad, h, weight, bias, target, pointwise, dtype, logits, rows, scale)


def by_rows_fwd(
    statistics: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    softmax_grad: Callable[..., Tensor],
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    pointwise: Pointwise,
    dtype: torch.dtype,
    logits: Tensor | None,
    rows: Tensor | None,
    scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`linear_cross_entropy_fwd` with two functions of some rows of logits: those of this file, or kernels."""
    if logits is None or scale is not None:
        weight, bias = weight.to(h.dtype), bias.to(h.dtype) if bias is not None else None
    dh = torch.zeros_like(h, dtype=_wide_dtype(h)) if scale is not None else None
    parts: list[Losses] = []
    for part in row_chunks(h, weight.size(0)):
        if logits is None:
            x = head_logits(h[part], weight, bias)
        else:
            x = logits[part] if rows is None else logits.index_select(0, rows[part])
        found = _row_losses(statistics, x, target[part], pointwise, dtype)
        parts.append(found)
        if dh is not None and scale is not None:
            of_each = scale.to(found[1].dtype).repeat(x.size(0))
            own = logits is None or rows is not None
            dx = _product_grad(softmax_grad, x, target[part], 0, *found[1:], of_each, pointwise, own)
            del x
            _accumulate_by_columns(dh[part], dx, weight)
            del dx
        else:
            del x  # otherwise it is in memory while the next one is made
    losses, maximum, log_sum = _joined(parts, h, dtype)
    return losses, maximum, log_sum, dh


def head_logits(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """h W^T + b [K, V] from h [K, D], of few rows summed in the same order as of many."""
    return F.linear(_in_blocks(h), weight, bias)[: h.size(0)]


def _row_losses(
    statistics: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    x: Tensor,
    target: Tensor,
    pointwise: Pointwise,
    dtype: torch.dtype,
) -> Losses:
    """The losses [K] of x [K, V] by torch's own ops, and the statistics; casts are made of a few rows at a time."""
    parts: list[Losses] = []
    for piece in row_pieces(x):
        y = applied(pointwise, x[piece]).to(dtype)
        log_probabilities = torch.log_softmax(y, 1)
        losses = F.nll_loss(log_probabilities, target[piece], ignore_index=NO_TARGET, reduction="none")
        parts.append((losses, *statistics(y, log_probabilities)))
        del y, log_probabilities
    return _joined(parts, x, dtype)


def _row_statistics(x: Tensor, log_probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum [K] of x [K, V], and the log of the sum of exponentials [K] of what is below it."""
    maximum = _wide(x.amax(1))
    if x.dtype == maximum.dtype:
        # at the maximum the log-probability is -log_sum, by torch's own computation and without another pass of exp
        return maximum, -log_probabilities.amax(1)
    return maximum, (_wide(x) - maximum[:, None]).exp_().sum(1).log_()


def _joined(parts: list[Losses], logits: Tensor, dtype: torch.dtype) -> Losses:
    if not parts:  # every target is ignored
        none = logits.new_empty(0, dtype=dtype)
        return none, _wide(none), _wide(none)
    losses, maximum, log_sum = (torch.cat(column) for column in zip(*parts, strict=True))
    return losses, maximum, log_sum


def linear_cross_entropy_bwd(
    dlosses: Tensor,
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    maximum: Tensor,
    log_sum: Tensor,
    pointwise: Pointwise,
    needs: tuple[bool, bool, bool],
    logits: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dh [K, D], dweight [V, D], dbias [V] from dlosses [K], as far as `needs` asks.

    It goes by chunks of the vocabulary, of `logits` [K, V] if these were kept. A row of dweight is one dot product over
    all K, rounded once. dh is a sum over chunks in fp32, and is returned in fp32 if there is more than one.
    """
    return chunked_bwd(_softmax_grad, dlosses, h, weight, bias, target, maximum, log_sum, pointwise, needs, logits)


def chunked_bwd(
    softmax_grad: Callable[..., Tensor],
    dlosses: Tensor,
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    maximum: Tensor,
    log_sum: Tensor,
    pointwise: Pointwise,
    needs: tuple[bool, bool, bool],
    logits: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`linear_cross_entropy_bwd` with a function of a chunk of logits: `_softmax_grad` or a kernel."""
    dh = torch.zeros_like(h, dtype=maximum.dtype) if needs[0] else None
    dweight = torch.empty_like(weight) if needs[1] else None
    dbias = torch.empty_like(bias) if needs[2] and bias is not None else None
    scale = dlosses.to(maximum.dtype)
    for part in chunks(weight.size(0), h.size(0), h.numel(), bounds_of(h)):
        weight_part = weight[part].to(h.dtype)
        if logits is None:
            x = F.linear(h, weight_part, bias[part].to(h.dtype) if bias is not None else None)
        else:
            x = logits[:, part]
        dx = _product_grad(
            softmax_grad, x, target, part.start, maximum, log_sum, scale, pointwise, in_place=logits is None
        )
        del x
        if dbias is not None:
            dbias[part] = _column_sums(dx)
        if dweight is not None:
            dweight[part] = dx.t().mm(h)
        if dh is not None and part == slice(0, weight.size(0)):
            dh = _product(dx, weight_part)  # the whole vocabulary in one chunk, as in stock
        elif dh is not None:
            _accumulate(dh, dx, weight_part)
        del dx, weight_part
    return dh, dweight, dbias


def _product_grad(
    softmax_grad: Callable[..., Tensor],
    x: Tensor,
    target: Tensor,
    start: int,
    maximum: Tensor,
    log_sum: Tensor,
    scale: Tensor,
    pointwise: Pointwise,
    in_place: bool,
) -> Tensor:
    """The gradient of x [K, C], the head's product from column `start` on. Overwrites x if `in_place` allows it."""
    if not pointwise:
        return softmax_grad(x, target, start, maximum, log_sum, scale, in_place)
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = applied(pointwise, x)
    dy = softmax_grad(y.detach(), target, start, maximum, log_sum, scale, False)
    return torch.autograd.grad(y, x, dy)[0]


def _softmax_grad(
    y: Tensor, target: Tensor, start: int, maximum: Tensor, log_sum: Tensor, scale: Tensor, in_place: bool
) -> Tensor:
    """dy like y [K, C], the logits from column `start` on: (softmax - 1 at the target) * scale [K]. May overwrite y."""
    scale = scale[:, None]
    # stock's formula for the softmax: two subtractions are accurate for large logits as well
    dy = (y - maximum[:, None]).sub_(log_sum[:, None]).exp_().mul_(scale)
    column, inside = _columns(target, start, y.size(1))
    return dy.scatter_add_(1, column, -scale * inside[:, None]).to(y.dtype)


def _columns(target: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    """The targets in a chunk of the vocabulary: columns [K, 1], clamped to the chunk, and if they are inside [K]."""
    inside = (target >= start) & (target < start + count)
    return (target - start).clamp_(0, count - 1)[:, None], inside


def _product(dx: Tensor, weight: Tensor) -> Tensor:
    """dx [K, C] @ weight [C, D], as accurate for the few rows with a target as for all rows of a batch."""
    return _in_blocks(dx).mm(weight)[: dx.size(0)]


def _in_blocks(x: Tensor) -> Tensor:
    """x [K, C], as the left side of a product; of few rows, with rows of zeros.

    On a CPU, MKL sums a product of few rows term by term, which in fp32 loses up to a digit over a vocabulary. With
    added rows it sums in blocks.
    """
    return F.pad(x, (0, 0, 0, FEW_ROWS - x.size(0))) if _adds_one_by_one(x) else x


def _adds_one_by_one(dx: Tensor) -> bool:
    return dx.device.type == "cpu" and dx.dtype == torch.float32 and dx.size(0) < FEW_ROWS


def _multiplies_into_fp32(dx: Tensor) -> bool:
    """Whether torch can multiply two matrices in 16 bits with a result in fp32."""
    return dx.is_cuda


def _accumulate(total: Tensor, dx: Tensor, weight: Tensor) -> None:
    """total [K, D] += dx [K, C] @ weight [C, D], where the product is not rounded to a narrower dtype first.

    The product's kernel adds to total itself: total is read and written once, and no product is stored.
    """
    if dx.dtype != total.dtype and _multiplies_into_fp32(dx):
        torch.addmm(total, dx, weight, out_dtype=total.dtype, out=total)
        return
    wide = dx.to(total.dtype)
    if _adds_one_by_one(wide):
        total.add_(_product(wide, weight.to(total.dtype)))
    else:
        total.addmm_(wide, weight.to(total.dtype))


def _accumulate_by_columns(total: Tensor, dx: Tensor, weight: Tensor) -> None:
    """total [K, D] += dx [K, V] @ weight [V, D]; where both are made wider for it, a few columns of dx at a time."""
    if dx.dtype == total.dtype or _multiplies_into_fp32(dx):
        _accumulate(total, dx, weight)
        return
    for part in chunks(weight.size(0), weight.size(1), dx.numel(), bounds_of(dx)):
        _accumulate(total, dx[:, part], weight[part])
