"""Causal attention of packed rows through torch's public function, a call for each piece; differentiable.

It runs on every device, and CUDA's kernels are compared with it before they are used.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from .attention import repeat_heads
from .sequences import Group, Sequences, chunks

# begin and end of the queries in each sequence of the group, their first key, and the mask [queries, keys] of a window
Piece = tuple[Group, int, int, int, Tensor | None]


def packed_sdpa(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, window: int | None, scale: float | None
) -> Tensor:
    """out [B, T, H, Dv] of `packed_attention_fwd` through `scaled_dot_product_attention`, a call for each piece."""
    groups = q.size(1) // k.size(1)
    parts: dict[Group, list[Tensor]] = {}
    for group, begin, end, first, mask in pieces(sequences, window, q):
        keys, values = (repeat_heads(group.part(x, first, end), groups) for x in (k, v))
        queries = group.part(q, begin, end)
        y = functional.scaled_dot_product_attention(queries, keys, values, mask, is_causal=mask is None, scale=scale)
        parts.setdefault(group, []).append(y)
    # [count, H, length, Dv] of each group, its tokens one after the other
    tokens = [torch.cat(found, 2).transpose(1, 2).flatten(0, 1) for found in parts.values()]
    return torch.cat(tokens).view(sequences.rows, sequences.tokens, q.size(1), v.size(-1))


def pieces(sequences: Sequences, window: int | None, q: Tensor) -> Iterator[Piece]:
    """What one call computes: some queries of each sequence of a group, and the keys that they see."""
    masks: dict[tuple[int, int], Tensor] = {}
    for group in sequences.groups:
        for begin, end, first in chunks(group.length, window):
            if begin == 0 or window is None:
                yield group, begin, end, first, None
                continue
            size = end - begin, end - first
            if size not in masks:
                masks[size] = torch.ones(size, dtype=torch.bool, device=q.device).triu_().tril_(window - 1)
            yield group, begin, end, first, masks[size]
