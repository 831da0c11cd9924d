"""How an attention call keeps its tensors [B, H, S, ...]. If padding is dropped, only rows of real tokens are kept.

The rows that are left out are zero in backward. This is exact for a padding query, because its dout is zero, and for a
padding key and value, because no real query attends to them. `load` checks the first condition, this file the second.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..codecs import IDENTITY, Codec
from ..records import (
    Derived,
    Padding,
    Recipe,
    Record,
    Stored,
    declare,
    is_dropped,
    keep,
    padding_in,
    record_in_order_of,
    shares_rows,
    stored_exact,
    whole_record_of,
)


def keep_heads(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, codec: Codec
) -> tuple[list[Record], bool]:
    """The records of q, k and v, shaped like them, and whether rows are left out (padding, or copies of others)."""
    parts = [(x, codec.part(name, heads=True)) for name, x in (("q", q), ("k", k), ("v", v))]
    padding = padding_in(q.transpose(1, 2))
    if padding is not None and (padding_in(k.transpose(1, 2)) is None or (mask is None and not is_causal)):
        # queries and keys are not of the same tokens, or real tokens can attend to padding
        padding = None
    shared = padding is None and all(shares_rows(x.transpose(1, 2)) for x in (q, k))
    if padding is None and not shared:
        # not the record that other consumers made without padding, because attention reads across rows
        return [_whole(x, of_x) for x, of_x in parts], False
    q_record, k_record, v_record = (_rows_of(x, of_x) for x, of_x in parts)
    keys = Derived(Recipe(_swap), (k_record,))
    if padding is not None:
        keys = Derived(
            Recipe(partial(_keys, note=padding.guard.note_attention)),
            (k_record, stored_exact(seen_by_real(padding, mask))),
        )
    return [Derived(Recipe(_swap), (q_record,)), keys, Derived(Recipe(_swap), (v_record,))], True


def _whole(x: Tensor, codec: Codec) -> Record:
    """The record of x [B, H, S, D] with all rows."""
    if not codec.heads_apart:
        return whole_record_of(x, codec)
    order = x.transpose(1, 2)
    record = record_in_order_of(x, order, codec)
    return Derived(Recipe(_swap), (Stored(codec, *codec.pack(order.detach())) if is_dropped(record) else record,))


def _rows_of(x: Tensor, codec: Codec) -> Record:
    """The record of x [B, H, S, D] as [B, S, H, D]."""
    order = x.transpose(1, 2)
    if not codec.along_tokens:
        return record_in_order_of(x, order, codec)
    # codecs that group neighbours need the next token beside each row, not the next head
    return Derived(Recipe(partial(_apart, heads=x.size(1))), (keep(order.flatten(2), codec),))


def keep_output_heads(out: Tensor, codec: Codec, dropped: bool) -> Record:
    """The record of an attention's output [B, H, S, D]; the next layer reads the same memory as [B, S, H, D]."""
    if codec == IDENTITY and not dropped:
        return stored_exact(out)
    order = out.transpose(1, 2)
    return Derived(Recipe(_swap), (record_in_order_of(out, order, output_codec(codec)),))


def output_codec(codec: Codec) -> Codec:
    """The codec for an attention's output."""
    return codec.part("output", heads=True)


def keep_row_heads(x: Tensor, dropped: bool) -> Record:
    """The record of x [B, H, S, ...] that belongs to the queries, exact: statistics and probabilities."""
    return Derived(Recipe(_swap), (keep(x.transpose(1, 2), IDENTITY),)) if dropped else stored_exact(x)


def tokens_first(out: Tensor, codec: Codec) -> Tensor:
    """An attention's output [B, H, S, D], which it keeps through `codec`, as [B, S, H, D] for the next layer.

    The kernels write in the order of the query's memory. If that is [B, H, S, D], the result is a copy, and derived.
    """
    order = out.transpose(1, 2)
    y = order.contiguous()
    if y.untyped_storage()._cdata != out.untyped_storage()._cdata:
        declare(y, torch.Tensor.contiguous, record_in_order_of(out.detach(), order.detach(), output_codec(codec)))
    return y


def _swap(rows: Tensor) -> Tensor:
    """Recompute function of [B, H, S, ...] from [B, S, H, ...]."""
    return rows.transpose(1, 2)


def _apart(rows: Tensor, *, heads: int) -> Tensor:
    """Recompute function of [B, S, H, D] from [B, S, H D]."""
    return rows.view(*rows.shape[:-1], heads, -1)


def _keys(rows: Tensor, seen: Tensor, *, note: Callable[[Tensor], None]) -> Tensor:
    """`_swap` for the keys. It also checks, by `note`, that no real token has attended to padding."""
    note(seen)
    return rows.transpose(1, 2)


def seen_by_real(padding: Padding, mask: Tensor | None) -> Tensor:
    """[], bool: whether a real query may attend to a padding key. It is computed once per forward for every mask."""
    real = padding.mask  # [B, S]
    if mask is None:
        # in causal attention real tokens never attend to padding on the right
        return padding.once(real, lambda: (real[:, 1:] & ~real[:, :-1]).any())
    return padding.once(mask, lambda: _attends(mask.detach(), real))


def _attends(mask: Tensor, real: Tensor) -> Tensor:
    # additive masks hide a key by the lowest value of their dtype, or by a value near it if something was added
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    allowed = allowed.expand(real.shape[0], allowed.size(-3) if allowed.dim() > 2 else 1, -1, -1)
    return (allowed & real[:, None, :, None] & ~real[:, None, None, :]).any()
