"""The weight gradient from sampled rows. The product reads the rows of dy that belong to them without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...kernels.common import traced
from ...kernels.grad_weight import sample_dy
from ..block_sparse.kernel import gathered


@traced(lambda dy, rows, index: dy.new_empty(dy.size(1), rows.size(1)))
def row_sample_grad_weight(dy: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """dW [O, D] from dy [R, O] and the kept rows [k, D] at `index` int32 [k]; sampling weights are in the rows."""
    (kept, features), outputs = rows.shape, dy.size(1)
    if rows.numel() == 0 or outputs == 0:
        return dy.new_zeros(outputs, features)
    # one column of tiles, each of one row
    edges = torch.arange(2, dtype=torch.int32, device=dy.device) * kept
    return gathered(dy, rows.unsqueeze(1), None, index.contiguous(), edges, features, kept)


def _samples(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> Iterator[tuple[Any, ...]]:
    for share, dy in zip((1.0, 0.5), sample_dy(device, dtype, rows), strict=False):
        # indices in random order, some of them twice
        index = torch.randint(max(rows, 1), (int(share * rows),), device=device, dtype=torch.int32)
        yield dy, torch.randn(len(index), width, device=device).to(dtype), index


SAMPLES = {"row_sample_grad_weight": _samples}
