"""Tiles of tokens and features: the choice of those to keep, and the weight gradient from these alone."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.groups import chunk_rows, chunk_starts, work_dtype
from ...reference.not_finite import nothing, spoiled


def block_sparse_pack(x: Tensor, block: tuple[int, int], k: int, quota: str) -> tuple[Tensor, Tensor]:
    """Keep the tiles of x [R, D] with the largest norms.

    Args:
        x: bf16, fp16, fp32 or fp64.
        block: Rows and features of a tile. Tiles at the end are filled up with zeros.
        k: How many tiles are kept per row of tiles ("row"), per column of tiles ("column") or in all ("global").
        quota: "row", "column" or "global".

    Returns:
        values [N, br, bc], all NaN if x has a NaN or inf; index int32 [N], row-major among all tiles, ascending
        ("column": column by column).
    """
    (br, bc), (rows, features) = block, x.shape
    down, across = -(-rows // br), -(-features // bc)
    x = torch.nn.functional.pad(x, (0, -features % bc, 0, -rows % br)) if features % bc or rows % br else x
    # a view [nr, nc, br, bc]
    tiles = torch.unflatten(torch.unflatten(x, 1, (across, bc)), 0, (down, br)).transpose(1, 2)
    norms = torch.linalg.vector_norm(tiles, dim=(2, 3), dtype=work_dtype(x.dtype))
    if quota == "global":
        index = _largest(norms.reshape(1, -1), k)
    elif quota == "row":
        index = _largest(norms, k) + torch.arange(down, device=x.device).unsqueeze(1) * across
    else:
        index = _largest(norms.t(), k) * across + torch.arange(across, device=x.device).unsqueeze(1)
    index = index.reshape(-1)
    # a tile with a NaN or inf has the largest norm, so if there is one, it is among the kept tiles
    return spoiled(tiles[index // across, index % across]), index.to(torch.int32)


def _largest(norms: Tensor, k: int) -> Tensor:
    """Ascending positions [n, k] of the k largest numbers of each row; NaN counts as the largest."""
    return norms.topk(k, dim=1, sorted=False).indices.sort(dim=1).values


def block_sparse_unpack(values: Tensor, index: Tensor, rows: int, features: int) -> Tensor:
    """x [R, D], zero where no tile was kept; all NaN if x had a NaN or inf."""
    _, br, bc = values.shape
    down, across = -(-rows // br), -(-features // bc)
    out = nothing(values, down, br, across, bc)
    out.transpose(1, 2)[index // across, index % across] = values
    return out.view(down * br, across * bc)[:rows, :features].contiguous()


def block_sparse_grad_weight(dy: Tensor, values: Tensor, index: Tensor, features: int, quota: str) -> Tensor:
    """dW [O, D] = dy^T x from the kept tiles alone, with their share of the dense product's operations. dy [R, O]."""
    _, br, bc = values.shape
    across = -(-features // bc)
    dy = torch.nn.functional.pad(dy, (0, 0, 0, -dy.size(0) % br)) if dy.size(0) % br else dy
    blocks = torch.unflatten(dy, 0, (-1, br))  # [nr, br, O]
    add = {"column": _by_column, "row": _by_row, "global": _by_tile}[quota]
    return add(blocks, values, index.long(), across)[:, :features]


def _by_column(blocks: Tensor, values: Tensor, index: Tensor, across: int) -> Tensor:
    """All columns have equally many tiles: one product of [O, k br] and [k br, bc] per column, no sums to add up."""
    out = blocks.new_empty(blocks.size(2), across, values.size(2))
    tiles = torch.unflatten(values, 0, (across, -1))  # [nc, k, br, bc]
    rows = (index // across).view(across, -1)
    for column in range(across):
        dy = blocks.index_select(0, rows[column]).flatten(0, 1)
        torch.mm(dy.t(), tiles[column].flatten(0, 1), out=out[:, column])
    return out.flatten(1)


def _by_row(blocks: Tensor, values: Tensor, index: Tensor, across: int) -> Tensor:
    """All rows have equally many tiles: one product of [k bc, br] and [br, O] per row, added to its k columns."""
    down, _, outputs = blocks.shape
    out = nothing(values, across, values.size(2), outputs).to(work_dtype(blocks.dtype))
    tiles = torch.unflatten(values.transpose(1, 2), 0, (down, -1))  # [nr, k, bc, br]
    columns = (index % across).view(down, -1)
    for row in range(down):
        products = tiles[row].flatten(0, 1).mm(blocks[row]).view(-1, *out.shape[1:])
        # no column occurs twice in a row of tiles, so the order of the sums is fixed
        out.index_add_(0, columns[row], products.to(out.dtype))
    return out.flatten(0, 1).t().to(blocks.dtype)


def _by_tile(blocks: Tensor, values: Tensor, index: Tensor, across: int) -> Tensor:
    """One product of [O, br] and [br, bc] per tile, added to its column of tiles; a few tiles at a time.

    It has the kept tiles' share of the operations, but the products are so small that torch's dense one is as fast.
    """
    outputs, (count, _, bc) = blocks.size(2), values.shape
    out = nothing(values, across, outputs, bc).to(work_dtype(blocks.dtype))
    step = min(chunk_rows(outputs * bc, blocks.device), max(count, 1))
    for start in chunk_starts(count, step):
        part = index[start : start + step]
        products = blocks[part // across].transpose(1, 2).bmm(values[start : start + step])  # [n, O, bc]
        # index_put sums in a fixed order on every device; index_add does not
        out.index_put_((part % across,), products.to(out.dtype), accumulate=True)
    return out.transpose(0, 1).flatten(1).to(blocks.dtype)
