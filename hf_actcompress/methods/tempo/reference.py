"""Eager attention that keeps the probabilities once: neither the dropped ones, nor the mask, nor the scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...reference.attention import repeat_heads, sum_groups
from ...reference.dropout import dropout_replay

aten: Any = torch.ops.aten


def attention_tempo_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    p: float,
    softmax_dtype: torch.dtype,
    probs_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, H, S, D]; and [B, H, S, K] twice: the probabilities in v's dtype, and after dropout. The calls are
    stock's.

    q [B, H, S, D], k and v [B, Hkv, K, D], mask additive, broadcastable to [B, H, S, K]. Softmax runs in
    `softmax_dtype`, dropout in `probs_dtype`.
    """
    groups = q.size(1) // k.size(1)
    scores = torch.matmul(q, repeat_heads(k, groups).transpose(2, 3)) * scale
    if mask is not None:
        scores = scores + mask
    probs = torch.softmax(scores, -1, dtype=softmax_dtype).to(probs_dtype)
    del scores
    dropped = torch.nn.functional.dropout(probs, p, training=True) if p > 0 else probs
    return torch.matmul(dropped.to(v.dtype), repeat_heads(v, groups)), probs.to(v.dtype), dropped


def attention_tempo_bwd(
    dout: Tensor,
    ddropped: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    probs: Tensor,
    rng_state: Tensor | None,
    scale: float,
    p: float,
    softmax_dtype: torch.dtype,
    probs_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv like q, k, v; and the gradient of scores + mask. `ddropped`: the returned probabilities' gradient."""
    groups = q.size(1) // k.size(1)
    # the mask divided by 1 - p, drawn once; both products below are those of the stock dropout
    keep = None
    if rng_state is not None:
        keep = dropout_replay(torch.ones(probs.shape, dtype=probs_dtype, device=probs.device), rng_state, p)
    dropped = probs if keep is None else (probs.to(probs_dtype) * keep).to(v.dtype)
    dv = sum_groups(torch.matmul(dropped.transpose(2, 3), dout), groups)
    del dropped
    dprobs = torch.matmul(dout, repeat_heads(v, groups).transpose(2, 3)).to(probs_dtype)
    if ddropped is not None:
        dprobs = dprobs + ddropped
    if keep is not None:
        dprobs = dprobs * keep
    dscores: Tensor = aten._softmax_backward_data(dprobs.to(softmax_dtype), probs.to(softmax_dtype), -1, softmax_dtype)
    dproduct = dscores.to(q.dtype) * scale
    dq = torch.matmul(dproduct, repeat_heads(k, groups))
    dk = torch.matmul(q.transpose(2, 3), dproduct).transpose(2, 3)
    return dq, sum_groups(dk, groups), dv, dscores
