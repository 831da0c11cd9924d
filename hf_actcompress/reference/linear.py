"""y = x W^T + b, with the weight in the layout of nn.Linear ([out, in]) or of Conv1D ([in, out])."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """y [..., O] from x [..., I]; weight [O, I], or [I, O] if `transposed`. It calls torch as the stock modules do."""
    if not transposed:
        return torch.nn.functional.linear(x, weight, bias)
    rows = x.view(-1, x.size(-1))
    y = torch.addmm(bias, rows, weight) if bias is not None else rows.mm(weight)
    return y.view(*x.shape[:-1], weight.size(1))


def linear_bwd(
    dy: Tensor, x: Tensor | None, weight: Tensor | None, transposed: bool, with_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx [..., I] (needs weight), dweight in weight's layout (needs x), dbias [O], from dy [..., O]."""
    rows = dy.reshape(-1, dy.size(-1))
    dx = dweight = None
    if weight is not None:
        dx = rows.mm(weight.t() if transposed else weight)
        dx = dx.view(*dy.shape[:-1], dx.size(-1))
    if x is not None:
        x_rows = x.reshape(-1, x.size(-1))
        dweight = x_rows.t().mm(rows) if transposed else rows.t().mm(x_rows)
    return dx, dweight, rows.sum(0) if with_bias else None
