"""h = act(gate) * up, the product of SwiGLU, GeGLU and their kin."""

from __future__ import annotations

import torch
from torch import Tensor

from .activation import activation_bwd


def gated_product_bwd(
    dh: Tensor, gate: Tensor, up: Tensor, activated: Tensor, kind: str, options: tuple[float, ...]
) -> tuple[Tensor, Tensor]:
    """dgate and dup from dh, all [..., F]; `activated` is act(gate). Rounded where the stock graph rounds."""
    dtype = torch.promote_types(activated.dtype, up.dtype)
    dup = (dh * activated.to(dtype)).to(up.dtype)
    dactivated = (dh * up.to(dtype)).to(activated.dtype)
    return activation_bwd(dactivated, gate, kind, options), dup
