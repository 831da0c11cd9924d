"""Attention within each sequence of packed rows, within windows, and in rows with padding. No T x T tensor is made.

There are three kernels. "pieces" runs the CPU's fused kernel for each group of neighbouring sequences of one length, or
for each block of queries of a band. "flash" and "efficient" are CUDA's (see packed_kernels.py) and take the bounds of
all sequences at once. For all other devices `packed_sdpa` (_packed_sdpa.py) computes the same through torch's public
attention, and is differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import packed_kernels
from ._packed_sdpa import pieces
from .attention import attention_bwd, attention_fwd, repeat_heads, sum_groups
from .sequences import Band, Sequences


def packed_attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, sequences: Sequences | Band, window: int | None,
    scale: float | None, kernel: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of q [B, H, T, D], k [B, Hkv, T, D] and v [B, Hkv, T, Dv] within each sequence.

    Args:
        q, k, v: Queries, keys and values.
        bounds: ``sequences.starts`` on the device, [N + 1] int32; for a band, which tokens are not padding, [B, T]
            bool, or None.
        sequences: The sequences, which are causal; or a band, which only "pieces" supports and which says what it is.
        window: How many keys a query sees on one side, itself included; None: all.
        scale: Factor of q k^T; None: D ** -0.5.
        kernel: "pieces", "flash" or "efficient".

    Returns:
        out [B, H, T, Dv] with the memory order of [B, T, H, Dv], and the statistics that backward needs.
    """
    if kernel != "pieces":
        assert isinstance(sequences, Sequences) and bounds is not None
        return packed_kernels.forward(kernel, q, k, v, bounds, sequences.longest, window, scale)
    b, h, t, _ = q.shape
    groups = h // k.size(1)
    # made with strides and not transposed, because a Function must not return a view
    width = v.size(-1)
    out = q.new_empty_strided((b, h, t, width), (t * h * width, width, h * width, 1))
    lse = q.new_empty((b, h, t), dtype=torch.promote_types(q.dtype, torch.float32))
    for group, begin, end, first, last, mask in pieces(sequences, window, q, bounds):
        # transformers repeats heads where there is a mask, and a mask is what these sequences stand for
        keys, values = (repeat_heads(group.part(x, first, last), groups) for x in (k, v))
        o, statistics = attention_fwd(group.part(q, begin, end), keys, values, mask, mask is None, scale)
        group.part(out, begin, end).copy_(o)
        group.part(lse, begin, end).copy_(statistics)
    return out, lse


def packed_attention_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: Tensor | None,
    sequences: Sequences | Band, window: int | None, scale: float | None, kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, shaped like q, k, v."""
    if kernel != "pieces":
        assert isinstance(sequences, Sequences) and bounds is not None
        return packed_kernels.backward(kernel, dout, q, k, v, out, lse, bounds, sequences.longest, window, scale)
    # several chunks of queries see the same keys, so the keys' gradients are sums
    wide = torch.promote_types(q.dtype, torch.float32) if sequences.shares_keys(window) else None
    dq, groups = torch.empty_like(q), q.size(1) // k.size(1)
    dk, dv = (torch.zeros_like(x, dtype=wide) for x in (k, v))
    for group, begin, end, first, last, mask in pieces(sequences, window, q, bounds):
        dy, queries, y, statistics = (group.part(x, begin, end) for x in (dout, q, out, lse))
        keys, values = (repeat_heads(group.part(x, first, last), groups) for x in (k, v))
        found = attention_bwd(dy, queries, keys, values, y, statistics, mask, mask is None, scale)
        group.part(dq, begin, end).copy_(found[0])
        group.part(dk, first, last).add_(sum_groups(found[1], groups))
        group.part(dv, first, last).add_(sum_groups(found[2], groups))
    return dq, dk.to(k.dtype), dv.to(v.dtype)
