"""h = act(gate) * up, the product of SwiGLU, GeGLU and similar MLPs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .activation import activation_bwd


def gated_product(
    gate: Tensor,
    up: Tensor,
    stock: Callable[[Tensor], Tensor],
    kind: str,
    options: tuple[float, ...],
    dtype: torch.dtype,
) -> Tensor:
    """act(gate) * up again, all [..., F], by stock's ops and so in its `dtype`. A kernel uses `kind`, not `stock`."""
    return stock(gate) * up


def gated_product_bwd(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    stock: Callable[[Tensor], Tensor],
    kind: str,
    options: tuple[float, ...],
) -> tuple[Tensor, Tensor]:
    """dgate and dup from dh, all [..., F]; `stock` is act, `kind` its formula. Rounded where the stock graph rounds."""
    return gated_product_bwd_of(dh, gate, up, stock(gate), kind, options)


def gated_product_bwd_of(
    dh: Tensor, gate: Tensor, up: Tensor, activated: Tensor, kind: str, options: tuple[float, ...]
) -> tuple[Tensor, Tensor]:
    """As `gated_product_bwd`, for callers that have act(gate) already."""
    dtype = torch.promote_types(activated.dtype, up.dtype)
    dup = (dh * activated.to(dtype)).to(up.dtype)
    dactivated = (dh * up.to(dtype)).to(activated.dtype)
    return activation_bwd(dactivated, gate, kind, options), dup


def gated_product_and_bwd(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    stock: Callable[[Tensor], Tensor],
    kind: str,
    options: tuple[float, ...],
    dtype: torch.dtype,
    owned: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The product again in `dtype`, dgate and dup. If dh is `owned` by this call, a kernel may write over it."""
    return gated_product(gate, up, stock, kind, options, dtype), *gated_product_bwd(dh, gate, up, stock, kind, options)
