"""Attention for the eager path, where the probabilities are materialised: they are kept once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...codecs import IDENTITY, Codec
from ...dispatch import implementation
from ...ops.autocast import autocast_dtype
from ...ops.first_order import once_differentiable
from ...ops.heads import keep_heads, keep_row_heads
from ...records import applied, load, save, stored_exact


class AttentionTempoFunction(torch.autograd.Function):
    """Variant "tempo": keeps q, k, v, the probabilities and the RNG state before the dropout."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float,
        p: float,
        dtypes: tuple[torch.dtype, torch.dtype],
        codec: Codec,
    ) -> tuple[Tensor, Tensor]:
        state = implementation("rng_state", q)(q.device) if p > 0 else None
        out, probs, dropped = implementation("attention_tempo_fwd", q)(q, k, v, mask, scale, p, *dtypes)
        kept, without_padding = keep_heads(q, k, v, mask, False, codec)
        save(ctx, *kept, keep_row_heads(probs, without_padding), stored_exact(state) if state is not None else None)
        ctx.constants = (scale, p, *dtypes)
        ctx.mask = (mask.shape, mask.dtype) if mask is not None else None
        return out, dropped

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, ddropped: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, probs, state = load(ctx, *(d.transpose(1, 2) if d is not None else None for d in (dout, ddropped)))
        without = dout is None
        if dout is None:
            dout = torch.zeros(q.shape[:3] + v.shape[3:], dtype=v.dtype, device=v.device)
        dq, dk, dv, dscores = implementation("attention_tempo_bwd", dout)(
            dout, ddropped, q, k, v, probs, state, *ctx.constants
        )
        dmask = None
        if ctx.mask is not None and ctx.needs_input_grad[3]:
            shape, dtype = ctx.mask
            dmask = dscores.sum_to_size(shape).to(dtype)
        return dq, dk, None if without else dv, dmask, None, None, None, None


def attention_tempo(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    *,
    dropout: float = 0.0,
    softmax_dtype: torch.dtype | None = None,
    probs_dtype: torch.dtype | None = None,
    codec: Codec = IDENTITY,
) -> tuple[Tensor, Tensor]:
    """Eager attention that keeps the probabilities once: softmax from its output, dropout from the generator's state.

    Args:
        q: ``[B, H, S, D]``.
        k, v: ``[B, Hkv, K, D]``, H a multiple of Hkv.
        mask: Additive, broadcastable to ``[B, H, S, K]``, or None. It may need a gradient (a position bias).
        scale: Factor on q k^T.
        dropout: Probability of a probability to be zeroed; 0 in evaluation.
        softmax_dtype: fp32 for the modules that say so (Llama), None for those that do not (BERT, GPT-2).
        probs_dtype: The dtype to which the module casts the probabilities before the dropout: the query's (Llama), the
            value's (GPT-2), None if it does not cast them (BERT).
        codec: How q, k and v are stored.

    Returns:
        The output ``[B, H, S, D]`` and the dropped probabilities ``[B, H, S, K]``, which stock returns as attention
        weights; both equal to stock's.

    Saves:
        q, k, v, and ``v.element_size()`` bytes per probability. Stock keeps the probabilities (twice, if the softmax
        runs in another dtype), the dropped ones, and the dropout's mask (1 byte on CUDA).

    Gradient:
        Exact, bit-equal to stock, where softmax runs in v's dtype. Where it runs in fp32 and v is narrower, the
        probabilities are rounded once to v's dtype, as stock rounds them for the product with v.

    Source:
        Tempo (arXiv 2210.10246). For SDPA, which keeps no probabilities at all, see ``fused_attention``.
    """
    dtype = autocast_dtype(q)
    if softmax_dtype is None:
        # the dtype of a product, and of its sum with the mask
        scores_dtype = dtype or q.dtype
        scores_dtype = torch.promote_types(scores_dtype, mask.dtype) if mask is not None else scores_dtype
        # a small call of torch tells: autocast runs softmax in fp32 on CUDA and leaves it alone on a CPU
        softmax_dtype = torch.softmax(torch.zeros(1, dtype=scores_dtype, device=q.device), -1).dtype
    if dtype is not None:
        # autograd casts here: the cast tensors are kept, and the wider ones are freed
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    dtypes = softmax_dtype, probs_dtype or softmax_dtype
    return applied(AttentionTempoFunction, q, k, v, mask, scale, dropout, dtypes, codec)
