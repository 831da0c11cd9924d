"""Causal attention inside of each sequence of packed rows."""

from __future__ import annotations

from torch import Tensor

from ..codecs import IDENTITY, Codec
from ..records import applied
from ..reference.sequences import Sequences
from .attention import FusedAttentionFunction


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    sequences: Sequences,
    scale: float | None = None,
    *,
    window: int | None = None,
    kernel: str = "pieces",
    codec: Codec = IDENTITY,
) -> Tensor:
    """Attention in which each token sees the tokens before it in its own sequence. No mask of T x T is made.

    Args:
        q: ``[B, H, T, D]``, of one dtype with k and v.
        k, v: ``[B, Hkv, T, D]``, H a multiple of Hkv.
        bounds: ``sequences.starts`` on the device, ``[N + 1]`` int32.
        sequences: Where the sequences of the B rows begin and end.
        scale: Factor on q k^T, or None for ``D ** -0.5``.
        window: How many keys a query sees, itself included; None: all before it.
        kernel: "pieces", the CPU's; "flash" or "efficient", CUDA's.
        codec: How q, k, v and the output are stored.

    Returns:
        ``[B, H, T, D]`` with the memory order of ``[B, T, H, D]``.

    Saves:
        q, k, v, the output and its statistics: 4 bytes per token and head (8 in fp64). Stock keeps the mask, and on a
        CPU an additive copy of it in each layer.

    Gradient:
        Exact: that of attention on each sequence alone.
    """
    options = sequences, window, scale, kernel
    out: Tensor = applied(FusedAttentionFunction, "packed_attention", q, k, v, bounds, options, True, codec)
    return out
