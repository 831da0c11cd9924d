"""Cross entropy of h W^T + b per row, in chunks: the logits exist one chunk at a time, forward and backward.

`pointwise` are the functions that the model applies to the logits before its loss (a cast to fp32, a softcap).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .device_rules import on_cpu
from .logits_chunks import Pointwise, applied, bounds_of, chunks, whole_chunks

Losses = tuple[Tensor, Tensor, Tensor]

# the target's value for a row without a target
NO_TARGET = -1
# from so many rows on, a CPU's product sums in blocks
FEW_ROWS = 16


def _wide(x: Tensor) -> Tensor:
    """x in fp32; fp64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype for sums of few numbers: the device's widest one."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def _column_sums(dx: Tensor) -> Tensor:
    """The sums of dx's columns: in fp64 on a CPU; in fp32, as in stock, on a device, where for fp64 torch copies dx."""
    return dx.sum(0, dtype=_sum_dtype(dx) if on_cpu(dx) else torch.promote_types(dx.dtype, torch.float32))


def _logits(h: Tensor, weight: Tensor, bias: Tensor | None, columns: slice) -> tuple[Tensor, Tensor]:
    """One chunk of logits [K, C] in h's dtype, and the chunk of the weight [C, D] that they are computed from."""
    part = weight[columns].to(h.dtype)
    return F.linear(h, part, bias[columns].to(h.dtype) if bias is not None else None), part


def cross_entropy_fwd(
    logits: Tensor, rows: Tensor | None, target: Tensor, pointwise: Pointwise, dtype: torch.dtype
) -> Losses:
    """Losses [K] in `dtype`, the maximum and the log of the sum of exponentials [K] of each row, from whole logits.

    Args:
        logits: ``[M, V]``, as the head made them.
        rows: ``[K]`` int64, the rows of the logits that count; None for all.
        target: ``[K]`` int64, `NO_TARGET` for a row without a target.
        pointwise: Applied to each chunk.
        dtype: The dtype in which torch's log_softmax computes the losses.
    """
    return whole_fwd(_row_statistics, logits, rows, target, pointwise, dtype)


def whole_fwd(
    statistics: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    logits: Tensor,
    rows: Tensor | None,
    target: Tensor,
    pointwise: Pointwise,
    dtype: torch.dtype,
) -> Losses:
    """`cross_entropy_fwd` with a function of a chunk of logits: `_row_statistics` or a kernel."""
    parts: list[Losses] = []
    for part in whole_chunks(logits, target.numel()):
        x = applied(pointwise, logits[part] if rows is None else logits.index_select(0, rows[part])).to(dtype)
        log_probabilities = torch.log_softmax(x, 1)
        losses = F.nll_loss(log_probabilities, target[part], ignore_index=NO_TARGET, reduction="none")
        parts.append((losses, *statistics(x, log_probabilities)))
        # otherwise they are in memory while the next chunk is made
        del x, log_probabilities
    return _joined(parts, logits, dtype)


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


def linear_cross_entropy_fwd(
    h: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, pointwise: Pointwise, dtype: torch.dtype
) -> Losses:
    """As `cross_entropy_fwd`, from h [K, D], weight [V, D], bias [V], in chunks of the vocabulary: no whole logits."""
    return chunked_fwd(_softmax_statistics, h, weight, bias, target, pointwise, dtype)


def chunked_fwd(
    statistics: Callable[..., None],
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    pointwise: Pointwise,
    dtype: torch.dtype,
) -> Losses:
    """`linear_cross_entropy_fwd` with a function of a chunk of logits: `_softmax_statistics` or a kernel."""
    wide = torch.promote_types(h.dtype, torch.float32)
    maximum = torch.full_like(target, -torch.inf, dtype=wide)
    picked = torch.zeros_like(maximum)
    # one number per row: fp64 costs almost nothing, and the roundings of many chunks do not add up
    total = torch.zeros_like(maximum, dtype=_sum_dtype(h))
    for part in chunks(weight.size(0), h.size(0), h.numel(), bounds_of(h)):
        x = applied(pointwise, _logits(h, weight, bias, part)[0])
        statistics(x, target, part.start, maximum, picked, total)
        del x
    log_sum = total.log_().to(wide)
    return (log_sum - (picked - maximum)).to(dtype), maximum, log_sum


def _softmax_statistics(x: Tensor, target: Tensor, start: int, maximum: Tensor, picked: Tensor, total: Tensor) -> None:
    """Update the running statistics [K] in place with logits [K, C], whose first column is column `start`."""
    x = _wide(x)
    column, inside = _columns(target, start, x.size(1))
    picked.copy_(torch.where(inside, x.gather(1, column)[:, 0], picked))
    larger = torch.maximum(maximum, x.amax(1))
    total.mul_((maximum - larger).exp_()).add_((x - larger[:, None]).exp_().sum(1))
    maximum.copy_(larger)


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
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dh [K, D], dweight [V, D], dbias [V] from dlosses [K], as far as `needs` asks.

    It goes by chunks of the vocabulary. A row of dweight is one dot product over all K, rounded once. dh is a sum over
    chunks in fp32, and is returned in fp32 if there is more than one.
    """
    return chunked_bwd(_softmax_grad, dlosses, h, weight, bias, target, maximum, log_sum, pointwise, needs)


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
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`linear_cross_entropy_bwd` with a function of a chunk of logits: `_softmax_grad` or a kernel."""
    dh = torch.zeros_like(h, dtype=maximum.dtype) if needs[0] else None
    dweight = torch.empty_like(weight) if needs[1] else None
    dbias = torch.empty_like(bias) if needs[2] and bias is not None else None
    scale = dlosses.to(maximum.dtype)
    for part in chunks(weight.size(0), h.size(0), h.numel(), bounds_of(h)):
        x, weight_part = _logits(h, weight, bias, part)
        if pointwise:
            with torch.enable_grad():
                x.requires_grad_()
                y = applied(pointwise, x)
            dy = softmax_grad(y.detach(), target, part.start, maximum, log_sum, scale, False)
            dx = torch.autograd.grad(y, x, dy)[0]
            del y, dy
        else:
            dx = softmax_grad(x, target, part.start, maximum, log_sum, scale, True)
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
    """dx [K, C] @ weight [C, D], as accurate for the few rows with a target as for all rows of a batch.

    On a CPU, MKL sums a product of few rows term by term, which in fp32 loses up to a digit over a vocabulary. With
    added rows of zeros it sums in blocks.
    """
    rows = dx.size(0)
    if not _adds_one_by_one(dx):
        return dx.mm(weight)
    return F.pad(dx, (0, 0, 0, FEW_ROWS - rows)).mm(weight)[:rows]


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
