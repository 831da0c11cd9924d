"""Attention within each sequence of packed rows, within windows, and in rows with padding."""

from __future__ import annotations

from torch import Tensor

from ..codecs import IDENTITY, Codec
from ..records import applied
from ..reference.sequences import Band, Sequences
from .attention import FusedAttentionFunction


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor | None,
    sequences: Sequences | Band,
    scale: float | None = None,
    *,
    window: int | None = None,
    kernel: str = "pieces",
    codec: Codec = IDENTITY,
) -> Tensor:
    """Attention in which each token sees those before it in its sequence, or those in a band. No T x T mask is made.

    Args:
        q: ``[B, H, T, D]``, of the same dtype as k and v.
        k, v: ``[B, Hkv, T, D]``, H a multiple of Hkv.
        bounds: ``sequences.starts`` on the device, ``[N + 1]`` int32; for a band, which tokens are not padding,
            ``[B, T]`` bool, or None.
        sequences: Where the sequences of the B rows begin and end; or a band, which only "pieces" supports.
        scale: Factor on q k^T, or None for ``D ** -0.5``.
        window: How many keys a query sees to one side, itself included; None: all.
        kernel: "pieces", the CPU's; "flash" or "efficient", CUDA's.
        codec: How q, k, v and the output are stored.

    Returns:
        ``[B, H, T, D]`` with the memory order of ``[B, T, H, D]``.

    Saves:
        q, k, v, the output and its statistics: 4 bytes per token and head (8 in fp64). Stock keeps the mask, and on a
        CPU an additive copy of it in each layer.

    Gradient:
        Exact: that of attention on each sequence alone, and that of attention with a mask.
    """
    options = sequences, window, scale, kernel
    return applied(FusedAttentionFunction, "packed_attention", q, k, v, bounds, options, True, codec)
