"""Rotary position embeddings of Llama and its kin: the two halves of a head turned by the position's angles.

The torch calls and their order are those of transformers' `apply_rotary_pos_emb`, so that values are bit-equal; the
backward rounds where stock's autograd graph does.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_fwd(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """y like x [B, H, S, D], in the wider of the dtypes; cos and sin broadcast to x ([B or 1, 1, S, D])."""
    half = x.size(-1) // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos) + (turned * sin)


def rope_bwd(dy: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """dx like dy [B, H, S, D], in `dtype`, that of x. Each product is rounded to it, then their sum."""
    half, rest = dy.size(-1) // 2, dy.size(-1) - dy.size(-1) // 2
    dx, turned = dy * cos, dy * sin
    if dx.dtype != dtype:
        dx, turned = dx.to(dtype), turned.to(dtype)
    # both are new; of an odd width the first half is the shorter one
    dx[..., :half].add_(turned[..., rest:])
    dx[..., half:].sub_(turned[..., :rest])
    return dx
