"""The temporary memory that a CPU's kernels allocate while they run, by op."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

Workspace = Callable[[tuple[Any, ...], dict[str, Any]], int]


def _index(args: Any, kwargs: Any) -> int:
    # the kernel reads int64 indices only, so others are converted
    narrow = (i for i in args[1] if i is not None and i.dtype not in (torch.int64, torch.bool))
    return sum(8 * i.numel() for i in narrow)


def _sum(args: Any, kwargs: Any) -> int:
    # a sum with another result dtype casts its input first
    dtype = kwargs.get("dtype")
    return args[0].numel() * dtype.itemsize if dtype is not None and dtype != args[0].dtype else 0


def _promotion(args: Any, kwargs: Any) -> int:
    # an operand whose dtype is not the result's is cast as a whole; numbers and 0-d tensors cost nothing
    operands = [x for x in args if isinstance(x, Tensor) and x.dim() > 0 and x.dtype != torch.bool]
    if not operands:
        return 0
    common = reduce(torch.promote_types, (x.dtype for x in operands))
    return sum(x.numel() * common.itemsize for x in operands if x.dtype != common)


_ELEMENTWISE = ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_")

# not in this table: the scratchpads of matrix products in half precision, about 100 KB whatever the size
CPU_WORKSPACES: dict[Any, Workspace] = {
    aten.index.Tensor: _index,
    aten.sum.dim_IntList: _sum,
    aten.sum.default: _sum,
    aten.where.self: _promotion,
    **{getattr(aten, name).Tensor: _promotion for name in _ELEMENTWISE},
}
