"""The weight gradient from pooled tokens. The product pools dy as it reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.common import as_rows, cast, on, traced
from ...kernels.grad_weight import (
    add_product,
    added,
    launch_of,
    load_dy,
    options,
    place,
    sample_dy,
    share,
    store_tile,
    tile_for,
)
from ...kernels.launch import CachedLaunches
from .reference import pooled_pack


@triton.jit
def _load_dy(dy_ptr, sequence, token, tokens, known, out, outputs, stride):
    """dy of one token of each sequence; 0 beyond the sequence's end."""
    row = sequence * tokens + token
    return load_dy(dy_ptr, row, known & (token < tokens), out, outputs, stride).to(tl.float32)


@CachedLaunches
@triton.jit
def _pooled_kernel(
    dy_ptr, x_ptr, out_ptr, groups, per_sequence, tokens, outputs, features, stride,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Sums over groups of WINDOW tokens, rounded once as in torch; a sequence's last group may have fewer tokens."""
    down, right = place(outputs, tl.cdiv(features, N), M)
    out = down * M + tl.arange(0, M)
    col = right * N + tl.arange(0, N)
    first, last = share(groups, K)
    sums = tl.zeros([M, N], tl.float32)
    for start in range(first, last, K):
        group = start + tl.arange(0, K)
        known = group < last
        sequence = (group // per_sequence).to(tl.int64)
        begin = (group % per_sequence).to(tl.int64) * WINDOW
        dy = tl.zeros([M, K], tl.float32)
        # as many copies to shared memory in flight as it has room for
        if WINDOW <= 4:
            for nth in tl.static_range(WINDOW):
                dy += _load_dy(dy_ptr, sequence, begin + nth, tokens, known, out, outputs, stride)
        else:
            for nth in range(WINDOW):
                dy += _load_dy(dy_ptr, sequence, begin + nth, tokens, known, out, outputs, stride)
        x = tl.load(
            x_ptr + group.to(tl.int64)[:, None] * features + col[None, :],
            mask=known[:, None] & (col < features)[None, :], other=0.0,
        )  # fmt: skip
        sums = add_product(sums, cast(dy, dy_ptr.dtype.element_ty), x, PRECISION)
    store_tile(out_ptr, sums, out, col, col < features, outputs, features)


@traced(lambda dy, pooled, window: dy.new_empty(dy.size(-1), pooled.size(-1)))
def pooled_grad_weight(dy: Tensor, pooled: Tensor, window: int) -> Tensor:
    """dW [O, C] from dy [..., T, O] and the means [..., ceil(T / p), C] over p = `window` tokens."""
    tokens, (groups, features) = dy.size(-2), pooled.shape[-2:]
    if dy.numel() == 0 or pooled.numel() == 0:
        return dy.new_zeros(dy.size(-1), features)
    rows, x = as_rows(dy), pooled.contiguous()
    # a step holds dy of several tokens, so it gets fewer of them
    tile = tile_for(rows, features, short=rows.element_size() == 2)
    sums, grid, tile = launch_of(rows, features, x.numel() // features, tile)
    with on(rows):
        _pooled_kernel[grid](
            rows, x, sums, x.numel() // features, groups, tokens, rows.size(1), features, rows.stride(0),
            WINDOW=window, **options(rows, tile),
        )  # fmt: skip
    return added(sums, dy.dtype)


def _samples(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> Iterator[tuple[Any, ...]]:
    """Two sequences, each with half of the rows."""
    for window, dy in zip((2, 4, 3, 6), sample_dy(device, dtype, rows // 2 * 2), strict=False):
        x = torch.randn(2, rows // 2, width, device=device).to(dtype)
        if x.numel():
            yield dy.view(2, rows // 2, -1), pooled_pack(x, window), window
        else:
            yield dy.view(2, 0, dy.size(1)), x, window


SAMPLES = {"pooled_grad_weight": _samples}
