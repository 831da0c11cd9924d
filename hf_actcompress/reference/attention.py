"""Attention by the CPU's fused kernel, whose backward can be called with tensors that an op has kept.

On other devices the op computes the stock call again in backward (see ops/attention.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten: Any = torch.ops.aten


def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """out [B, H, S, D] and logsumexp [B, H, S] of q [B, H, S, D], k and v [B, Hkv, K, D]; mask bool (True: attend)
    or additive, broadcastable to [B, H, S, K].

    Without a mask the kernel shares a head of k and v among heads of q itself; with one, transformers repeats k and v.
    """
    groups = 1 if mask is None else q.size(1) // k.size(1)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q,
        repeat_heads(k, groups),
        repeat_heads(v, groups),
        0.0,
        is_causal,
        attn_mask=additive(mask, q.dtype),
        scale=scale,
    )
    return out, lse


def attention_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, shaped like q, k, v. Heads that were repeated are repeated again, their gradients summed."""
    groups = 1 if mask is None else q.size(1) // k.size(1)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, repeat_heads(k, groups), repeat_heads(v, groups), out, lse, 0.0, is_causal,
        attn_mask=additive(mask, q.dtype), scale=scale,
    )  # fmt: skip
    return dq, sum_groups(dk, groups), sum_groups(dv, groups)


def repeat_heads(x: Tensor, groups: int) -> Tensor:
    """[B, H * groups, S, D] from x [B, H, S, D]: each head as often as grouped-query attention uses it."""
    if groups == 1:
        return x
    b, h, s, d = x.shape
    return x.unsqueeze(2).expand(b, h, groups, s, d).reshape(b, h * groups, s, d)


def sum_groups(dx: Tensor, groups: int) -> Tensor:
    """The gradient of `repeat_heads`."""
    b, h, s, d = dx.shape
    return dx if groups == 1 else dx.view(b, h // groups, groups, s, d).sum(2)


def additive(mask: Tensor | None, dtype: torch.dtype) -> Any:
    """A bool mask (True: attend) as an additive one; an additive mask as it is."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask.logical_not(), float("-inf"))
