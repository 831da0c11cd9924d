"""Attention of packed and padded rows through torch's public function, a call for each piece; differentiable.

It runs on every device, and CUDA's kernels are compared with it before they are used.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from .attention import repeat_heads
from .sequences import Band, Group, Sequences, chunks

# (rows, begin and end of the queries in each sequence, first key and end of the keys, mask); the mask is
# [1 or B, 1, 1 or queries, keys], or None for causal attention
Piece = tuple[Group | Band, int, int, int, int, Tensor | None]


def packed_sdpa(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences | Band, window: int | None, scale: float | None,
    real: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """out [B, T, H, Dv] of `packed_attention_fwd` through `scaled_dot_product_attention`, a call for each piece.

    `real` says which tokens of a band are no padding.
    """
    groups = q.size(1) // k.size(1)
    parts: dict[Group | Band, list[Tensor]] = {}
    for group, begin, end, first, last, mask in pieces(sequences, window, q, real):
        keys, values = (repeat_heads(group.part(x, first, last), groups) for x in (k, v))
        queries = group.part(q, begin, end)
        y = functional.scaled_dot_product_attention(queries, keys, values, mask, is_causal=mask is None, scale=scale)
        parts.setdefault(group, []).append(y)
    # [count, H, length, Dv] for each group, whose tokens follow one another
    tokens = [torch.cat(found, 2).transpose(1, 2).flatten(0, 1) for found in parts.values()]
    return torch.cat(tokens).view(sequences.rows, sequences.tokens, q.size(1), v.size(-1))


def pieces(sequences: Sequences | Band, window: int | None, q: Tensor, real: Tensor | None) -> Iterator[Piece]:
    """The parts, each for one call of attention: some queries of each sequence of a group, and the keys they see."""
    if isinstance(sequences, Band):
        yield from _blocks(sequences, window, q, real)
        return
    masks: dict[tuple[int, int], Tensor] = {}
    for group in sequences.groups:
        for begin, end, first in chunks(group.length, window):
            if begin == 0 or window is None:
                yield group, begin, end, first, end, None
                continue
            size = end - begin, end - first
            if size not in masks:
                masks[size] = torch.ones(size, dtype=torch.bool, device=q.device).triu_().tril_(window - 1)
            yield group, begin, end, first, end, masks[size]


def _blocks(band: Band, window: int | None, q: Tensor, real: Tensor | None) -> Iterator[Piece]:
    """The pieces of a band. With `real` [B, T], which is False for padding, no query sees padding."""
    chunk = None
    if band.chunked and real is not None and window is not None:
        chunk = (torch.arange(band.tokens, device=q.device) - first_real(real)).div(window, rounding_mode="floor")
    for begin, end, first, last in band.blocks(window):
        mask = None if real is None else real[:, None, None, first:last]
        if band.causal or window is not None:
            # row i is the query of token begin + i, and column j is the key of token first + j
            here = begin - first
            seen = torch.ones(end - begin, last - first, dtype=torch.bool, device=q.device)
            if window is not None:
                seen.triu_(here - window + 1)
            seen.tril_(here if band.causal else here + (window or 0) - 1)
            mask = seen[None, None] if mask is None else seen & mask
            if chunk is not None:
                mask = mask & (chunk[:, None, begin:end, None] == chunk[:, None, None, first:last])
        yield band, begin, end, first, last, mask


def first_real(real: Tensor) -> Tensor:
    """[B, 1]: how many tokens of padding each row has on the left."""
    return (real.cumsum(1) == 0).sum(1, keepdim=True)
