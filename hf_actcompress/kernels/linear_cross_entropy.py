"""The loss head's passes over a chunk of logits: one for the softmax's statistics, and one, in place, for its gradient.

The products are torch's, and the chunks have the same order, as in the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compiling import is_compiling
from ..reference.linear_cross_entropy import by_rows_fwd, chunked_bwd
from ..reference.logits_chunks import Pointwise
from .common import STRICT, as_rows, cast, cdiv, exp, next_power_of_2, on, traced
from .launch import CachedLaunches

_WIDEST_TILE = 4096


@triton.jit
def _scanned(x_ptr, columns, larger, C: tl.constexpr):
    """The maximum of `larger` and a row of logits, and the sum of the exponentials of what is below it."""
    sums = tl.zeros([C], tl.float32)
    for start in range(0, columns, C):
        cols = start + tl.arange(0, C)
        inside = cols < columns
        x = tl.load(x_ptr + cols, mask=inside, other=float("-inf")).to(tl.float32)
        largest = tl.max(x, axis=0)
        # the maximum leaves out NaN; the sum of exponentials keeps it
        new = tl.maximum(larger, tl.where(largest == largest, largest, larger))
        # exp(-inf - -inf) is NaN: nothing has been summed yet, so the factor is 1
        sums *= tl.where(larger == new, 1.0, exp(larger - new, False))
        sums += tl.where(inside, exp(x - new, False), 0.0)
        larger = new
    return larger, tl.sum(sums, axis=0).to(tl.float64)


@CachedLaunches
@triton.jit
def _row_statistics_kernel(x_ptr, maximum_ptr, log_sum_ptr, columns, stride, C: tl.constexpr):
    """The statistics of a row whose logits are all there."""
    row = tl.program_id(0).to(tl.int64)
    maximum, total = _scanned(x_ptr + row * stride, columns, tl.full([], float("-inf"), tl.float32), C)
    tl.store(maximum_ptr + row, maximum)
    tl.store(log_sum_ptr + row, tl.log(total).to(tl.float32))


@CachedLaunches
@triton.jit
def _grad_kernel(
    y_ptr, dy_ptr, target_ptr, maximum_ptr, log_sum_ptr, scale_ptr, first, columns, stride, C: tl.constexpr
):  # fmt: skip
    """Writes the gradient into dy, which may be y: the thread that read an element writes it."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * C + tl.arange(0, C)
    inside = cols < columns
    y = tl.load(y_ptr + row * stride + cols, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + row)
    # two subtractions one after the other, as in the reference
    dy = exp((y - tl.load(maximum_ptr + row)) - tl.load(log_sum_ptr + row), False) * scale
    dy = tl.where(cols == tl.load(target_ptr + row) - first, dy - scale, dy)
    tl.store(dy_ptr + row * columns + cols, cast(dy, dy_ptr.dtype.element_ty), mask=inside)


@traced(lambda *_: None, mutates=("dy",))
def _softmax_grad_into(
    y: Tensor, dy: Tensor, target: Tensor, start: int, maximum: Tensor, log_sum: Tensor, scale: Tensor
) -> None:
    if y.numel() == 0:
        return
    y = as_rows(y)
    columns = y.size(1)
    C = min(next_power_of_2(columns), _WIDEST_TILE)
    with on(y):
        _grad_kernel[(y.size(0), cdiv(columns, C))](
            y, dy, target, maximum, log_sum, scale, start, columns, y.stride(0), C=C, num_warps=_warps(C), **STRICT
        )


def _warps(columns: int) -> int:
    return max(min(columns // 512, 8), 1)


def _softmax_grad(
    y: Tensor, target: Tensor, start: int, maximum: Tensor, log_sum: Tensor, scale: Tensor, in_place: bool
) -> Tensor:
    """The gradient, in y if y may be overwritten and no graph is traced (an operator must not get a tensor twice)."""
    dy = y if in_place and y.is_contiguous() and not is_compiling() else y.new_empty(y.shape)
    _softmax_grad_into(y, dy, target, start, maximum, log_sum, scale)
    return dy


@traced(lambda x: [x.new_empty(x.size(0), dtype=torch.float32) for _ in range(2)])
def _row_statistics(x: Tensor) -> list[Tensor]:
    maximum, log_sum = (x.new_empty(x.size(0), dtype=torch.float32) for _ in range(2))
    if x.numel() == 0:
        return [maximum.fill_(-torch.inf), log_sum.fill_(-torch.inf)]
    x = as_rows(x)
    columns = x.size(1)
    C = min(next_power_of_2(columns), _WIDEST_TILE)
    with on(x):
        _row_statistics_kernel[(x.size(0),)](
            x, maximum, log_sum, columns, x.stride(0), C=C, num_warps=_warps(C), **STRICT
        )
    return [maximum, log_sum]


def statistics(x: Tensor, log_probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum [K] of x [K, V], and the log of the sum of exponentials [K] of what is below it, in one pass."""
    maximum, log_sum = _row_statistics(x)
    return maximum, log_sum


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
    """Losses [K] in `dtype` by torch's own ops, maximum and log of the sum of exponentials [K], and dh [K, D]."""
    given = (h, weight, bias, target.contiguous(), pointwise, dtype, logits, rows, scale)
    return by_rows_fwd(statistics, _softmax_grad, *given)


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
    """dh [K, D], dweight [V, D], dbias [V] from dlosses [K], as far as `needs` asks."""
    statistics = (target.contiguous(), maximum.contiguous(), log_sum.contiguous())
    return chunked_bwd(_softmax_grad, dlosses.contiguous(), h, weight, bias, *statistics, pointwise, needs, logits)


def _softcap(x: Tensor) -> Tensor:
    """A pointwise function that some models apply to their logits."""
    return torch.tanh(x.to(torch.promote_types(x.dtype, torch.float32)) / 5) * 5


def _samples(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> Iterator[tuple[Any, ...]]:
    """h with 16 features, and a vocabulary of `width` words."""
    h = torch.randn(rows, 16, device=device).to(dtype)
    weight, bias = torch.randn(width, 16, device=device).to(dtype), torch.randn(width, device=device).to(dtype)
    target = torch.randint(width, (rows,), device=device)
    for pointwise in ((), (_softcap,)):
        yield h, weight, bias if pointwise else None, target, pointwise


def _sample_fwd(*sizes: Any) -> Iterator[tuple[Any, ...]]:
    """From hidden states and from logits, of all rows and of every other one, with and without the gradient."""
    scale = torch.tensor(0.3, device=sizes[0])
    for h, weight, bias, target, pointwise in _samples(*sizes):
        yield h, weight, bias, target, pointwise, torch.float32, None, None, None if pointwise else scale
        logits = 4 * torch.nn.functional.linear(h, weight, bias)
        some = torch.arange(0, h.size(0), 2, device=h.device) if pointwise else None
        of_some = (h, target) if some is None else (h[some], target[some])
        dtype = torch.float32 if pointwise else h.dtype
        yield of_some[0], weight, bias, of_some[1], pointwise, dtype, logits, some, scale if pointwise else None


def _sample_bwd(*sizes: Any) -> Iterator[tuple[Any, ...]]:
    """With logits that are recomputed, and with kept ones."""
    for h, weight, bias, target, pointwise in _samples(*sizes):
        kept = torch.nn.functional.linear(h, weight, bias)
        x = kept
        for function in pointwise:
            x = function(x)
        maximum = x.float().amax(1)
        log_sum = (x.float() - maximum[:, None]).exp().sum(1).log()
        dlosses = torch.rand(h.size(0), device=h.device)
        for logits in (None, kept):
            yield dlosses, h, weight, bias, target, maximum, log_sum, pointwise, (True, True, True), logits


SAMPLES = {
    "linear_cross_entropy_bwd": _sample_bwd,
    "linear_cross_entropy_fwd": _sample_fwd,
}
