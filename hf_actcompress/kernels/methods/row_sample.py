"""The weight gradient out of sampled rows, without a copy of the rows of dy that meet them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..common import traced
from ..grad_weight import fake_grad_weight, sample_dy
from .block_sparse import gathered


def _fake_grad_weight(dy: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    return fake_grad_weight(dy, rows.size(1))


@traced(_fake_grad_weight)
def _row_sample_grad_weight(dy: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    (kept, features), outputs = rows.shape, dy.size(1)
    if rows.numel() == 0 or outputs == 0:
        return dy.new_zeros(outputs, features)
    # one column of tiles, of one row each
    edges = torch.arange(2, dtype=torch.int32, device=dy.device) * kept
    return gathered(dy, rows.unsqueeze(1), None, index.contiguous(), edges, features, kept)


def row_sample_grad_weight(dy: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """dW [O, D] of dy [R, O] and the kept rows [k, D], whose weights are in them, at `index` int32 [k]."""
    dweight: Tensor = _row_sample_grad_weight(dy, rows, index)
    return dweight


def _samples(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> Iterator[tuple[Any, ...]]:
    for share, dy in zip((1.0, 0.5), sample_dy(device, dtype, rows), strict=False):
        # in no order, and some twice
        index = torch.randint(max(rows, 1), (int(share * rows),), device=device, dtype=torch.int32)
        yield dy, torch.randn(len(index), width, device=device).to(dtype), index


SAMPLES = {"row_sample_grad_weight": _samples}
