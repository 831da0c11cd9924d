"""Nodes that a plan's code writes inside of the calls that read them: one function of torch computes both."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from ..reference.device_rules import on_cpu

aten = torch.ops.aten
# products whose last argument may be a transposed weight
PRODUCTS = frozenset({aten.mm.default, aten.addmm.default})
_NARROW = (torch.bfloat16, torch.float16)


def is_in_linear(node: Node) -> bool:
    """Whether a node is a transposed weight, read by products that a linear function computes with the weight."""
    if node.target is not aten.t.default or not node.users:
        return False
    return all(
        user.target in PRODUCTS
        and user.args[-1] is node
        and user.args.count(node) == 1
        and not user.kwargs
        and (len(user.args) == 2 or user.args[0].meta["val"].dim() == 1)  # type: ignore[union-attr]
        for user in node.users
    )


def is_in_cast(node: Node) -> bool:
    """Whether a node is a sum of a narrow and a wide tensor that is only cast to the narrow dtype."""
    if node.target is not aten.add.Tensor or len(node.all_input_nodes) != 2 or node.kwargs or len(node.users) != 1:
        return False
    (cast,) = node.users
    narrow = cast.kwargs.get("dtype")
    if cast.target is not aten._to_copy.default or len(cast.kwargs) != 1 or narrow not in _NARROW:
        return False
    total, *values = [x.meta["val"] for x in (node, *node.all_input_nodes)]
    if not all(isinstance(x, Tensor) and str(x.shape) == str(total.shape) for x in values):
        return False
    return {x.dtype for x in values} == {narrow, torch.float32}


def narrow_sum(a: Tensor, b: Tensor, dtype: torch.dtype, free: bool) -> Tensor:
    """``(a + b).to(dtype)``: added in fp32 and rounded once, on a GPU by one kernel without a sum in fp32.

    `free`: whether the one in fp32 may be written on. A CPU would make copies for a result in another dtype.
    """
    if not on_cpu(a):
        return torch.add(a, b, out=torch.empty_like(a, dtype=dtype))
    wide, narrow = (b, a) if a.dtype == dtype else (a, b)
    return (wide.add_(narrow) if free else wide + narrow).to(dtype)
