"""The backward of a linear layer whose output's gradient is made a few rows at a time and never exists as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from .linear import linear_bwd
from .linear_cross_entropy import _accumulate, _column_sums, _product, _sum_dtype
from .logits_chunks import Pointwise, applied, bounds_of, chunks

# fmt: skip

_Grads = tuple[Tensor | None, Tensor | None, Tensor | None]
# from a slice of rows and a function that gives their logits [K, V]: the gradient [K, V] of these; None if it is zero
RowGradient = Callable[[slice, Callable[[], Tensor]], Tensor | None]


def matrix_slices(rows: int, width: int) -> Iterable[slice]:
    """Slices of the rows of a matrix of that width; at least sixteen rows each if the matrix is large."""
    return chunks(rows, width, rows * width // 16)


def linear_rows(h: Tensor, weight: Tensor, bias: Tensor | None, pointwise: Pointwise) -> Tensor:
    """``pointwise(h W^T + b)`` [K, V] from h [K, D] and weight [V, D] of the same dtype."""
    with torch.autocast(h.device.type, enabled=False):
        return applied(pointwise, F.linear(h, weight, bias))


def linear_rows_bwd(
    gradient: RowGradient,
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pointwise: Pointwise,
    needs: tuple[bool, bool, bool],
    whole: bool = False,
) -> _Grads:
    """dh [M, D], dweight [V, D], dbias [V], as far as `needs` asks; sums over several chunks are in fp32.

    Args:
        gradient: Gives the gradient of ``pointwise(h W^T + b)`` for a slice of rows.
        h: ``[M, D]``.
        weight: ``[V, D]`` in h's dtype.
        bias: ``[V]`` in h's dtype, or None.
        pointwise: Elementwise functions that are applied to the product.
        needs: Which of the three gradients are wanted.
        whole: Whether the gradient exists as a whole already; then all rows are one chunk, as in stock.
    """
    rows, width = h.size(0), weight.size(0)
    # the weight's gradient is a sum over chunks, which each chunk reads and writes once
    parts = [slice(0, rows)] if whole else list(chunks(rows, width, rows * width // 16, bounds_of(h)))
    if len(parts) == 1:
        dx = _product_gradient(gradient, parts[0], h, weight, bias, pointwise)
        dx = h.new_zeros((h.size(0), weight.size(0))) if dx is None else dx
        return linear_bwd(dx, h if needs[1] else None, weight if needs[0] else None, False, needs[2])
    wide = torch.promote_types(h.dtype, torch.float32)
    dh = torch.zeros_like(h) if needs[0] else None
    dweight = torch.zeros_like(weight, dtype=wide) if needs[1] else None
    dbias = weight.new_zeros(weight.size(0), dtype=_sum_dtype(h)) if needs[2] else None
    for part in parts:
        dx = _product_gradient(gradient, part, h[part], weight, bias, pointwise)
        if dx is None:
            continue
        if dh is not None:
            dh[part] = _product(dx, weight)
        if dweight is not None:
            _accumulate(dweight, dx.t(), h[part])
        if dbias is not None:
            dbias.add_(_column_sums(dx))
        del dx
    return dh, dweight, dbias


def _product_gradient(
    gradient: RowGradient, part: slice, h: Tensor, weight: Tensor, bias: Tensor | None, pointwise: Pointwise
) -> Tensor | None:
    """The gradient of the product itself, before the pointwise functions."""
    if not pointwise:
        return gradient(part, lambda: linear_rows(h, weight, bias, ()))
    x = linear_rows(h, weight, bias, ())
    with torch.enable_grad():
        y = applied(pointwise, x.requires_grad_())
    dy = gradient(part, y.detach)
    return torch.autograd.grad(y, x, dy)[0] if dy is not None else None
