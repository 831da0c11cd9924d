"""Rotary position embeddings as in Llama: the two halves of a head are rotated by the position's angles.

The calls of torch and their order are those of transformers' `apply_rotary_pos_emb`, so that values are bit-equal. The
backward rounds where stock's autograd graph does.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_fwd(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """y like x [B, H, S, D], in the wider dtype of x and angles; cos and sin broadcast to x ([B or 1, 1, S, D])."""
    half = x.size(-1) // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos) + (turned * sin)


def rope_bwd(dy: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """dx like dy [B, H, S, D], in `dtype`, which is x's. Each product is rounded to it, and then their sum."""
    half, rest = dy.size(-1) // 2, dy.size(-1) - dy.size(-1) // 2
    dx, turned = dy * cos, dy * sin
    if dx.dtype != dtype:
        dx, turned = dx.to(dtype), turned.to(dtype)
    # both tensors are new, so they may be written; if the width is odd, the first half is the shorter one
    dx[..., :half].add_(turned[..., rest:])
    dx[..., half:].sub_(turned[..., :rest])
    return dx
