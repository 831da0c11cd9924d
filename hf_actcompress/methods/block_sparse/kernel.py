"""The weight gradient from kept tiles or kept rows. The product reads the rows of dy that belong to them in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.common import as_rows, cdiv, on, traced
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
from ...reference.not_finite import nothing
from .reference import block_sparse_pack


@CachedLaunches
@triton.jit
def _gathered_kernel(
    dy_ptr, x_ptr, order_ptr, block_ptr, edge_ptr, out_ptr, rows, outputs, features, stride, br, bc,
    PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Sums over one column of kept tiles [br, bc]: those from edge[c] to edge[c + 1], ordered by their rows.

    `block` says to which br rows of dy a tile belongs. `order` is its index in x; None: tile n is at index n.
    """
    pieces = tl.cdiv(bc, N)
    down, right = place(outputs, tl.cdiv(features, bc) * pieces, M)
    column = right // pieces
    out = down * M + tl.arange(0, M)
    col = (right % pieces) * N + tl.arange(0, N)
    begin = tl.load(edge_ptr + column)
    first, last = share((tl.load(edge_ptr + column + 1) - begin) * br, K)
    sums = tl.zeros([M, N], tl.float32)
    for start in range(first, last, K):
        at = start + tl.arange(0, K)
        nth = begin + at // br
        line = at % br
        row = tl.load(block_ptr + nth, mask=at < last, other=0).to(tl.int64) * br + line
        # the last tile of a column may have rows beyond the end of x
        known = (at < last) & (row < rows)
        tile = nth if order_ptr is None else tl.load(order_ptr + nth, mask=known, other=0)
        dy = load_dy(dy_ptr, row, known, out, outputs, stride)
        x_row = (tile.to(tl.int64) * br + line) * bc
        x = tl.load(x_ptr + x_row[:, None] + col[None, :], mask=known[:, None] & (col < bc)[None, :], other=0.0)
        sums = add_product(sums, dy, x, PRECISION)
    # columns beyond this column of tiles belong to the next one
    inside = (col < bc) & (column * bc + col < features)
    store_tile(out_ptr, sums, out, column * bc + col, inside, outputs, features)


def gathered(
    dy: Tensor, x: Tensor, order: Tensor | None, block: Tensor, edges: Tensor, features: int, count: int
) -> Tensor:
    """dW [O, D] of dy [R, O] and tiles x [N, br, bc].

    `order` and `block` are int32 [N], `edges` int32 [columns of tiles + 1]; a column has about `count` rows of tiles.
    """
    dy, x, (_, br, bc) = as_rows(dy), x.contiguous(), x.shape
    sums, grid, tile = launch_of(dy, features, count, tile_for(dy, bc), bc)
    with on(dy):
        _gathered_kernel[grid](
            dy, x, order, block, edges, sums, dy.size(0), dy.size(1), features, dy.stride(0), br, bc,
            **options(dy, tile),
        )  # fmt: skip
    return added(sums, dy.dtype)


@traced(lambda dy, values, index, features, quota: dy.new_empty(dy.size(1), features))
def block_sparse_grad_weight(dy: Tensor, values: Tensor, index: Tensor, features: int, quota: str) -> Tensor:
    """dW [O, D] from dy [R, O] and the kept tiles [N, br, bc], for any quota."""
    (tiles, br, bc), outputs = values.shape, dy.size(1)
    if dy.numel() == 0 or features == 0 or tiles == 0:
        return dy.new_zeros(outputs, features)
    across = cdiv(features, bc)
    order, at = None, torch.arange(across + 1, dtype=torch.int32, device=dy.device)
    if quota == "column":
        # every column has the same number of tiles
        edges = at * (tiles // across)
    else:
        columns, places = (index % across).sort(stable=True)
        order, edges = places.to(torch.int32), torch.searchsorted(columns, at, out_int32=True)
        index = index[places]
    block = (index // across).to(torch.int32)
    dweight = gathered(dy, values, order, block, edges, features, tiles * br // across)
    # with this quota every column has a tile, whose values are NaN if x was not finite; with another, some may have
    # none
    return dweight if quota == "column" else dweight.add_(nothing(values, 1))


def _samples(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> Iterator[tuple[Any, ...]]:
    cases = (((32, 32), "column"), ((32, 32), "global"), ((5, 20), "row"), ((3, 200), "column"))
    for ((br, bc), quota), dy in zip(cases, sample_dy(device, dtype, rows), strict=False):
        if rows == 0 and quota == "row":
            # the reference divides the tiles among the rows of tiles
            continue
        x = torch.randn(rows, width, device=device).to(dtype)
        down, across = cdiv(rows, br), cdiv(width, bc)
        k = cdiv({"column": down, "row": across, "global": down * across}[quota], 2)
        yield dy, *block_sparse_pack(x, (br, bc), k, quota), width, quota


SAMPLES = {"block_sparse_grad_weight": _samples}
