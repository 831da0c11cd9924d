"""A model's own attention (a softcap, sinks), computed for some rows of queries at a time: no T x T tensor is kept, and
none is made for a mask without memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..codecs import IDENTITY, Codec
from ..records import applied, load, save, stored_exact, whole_record_of
from ..reference.mask_rows import MaskRows
from ..reference.tiles import tiles
from .autocast import SameAutocast
from .first_order import once_differentiable
from .packed_mask import PackedMask
from .region import result_in_region
from .snapshot import Snapshot, alias, of_function

# stock's call: (some rows of queries, all keys, all values, these rows of the mask) -> [B, rows, H, D]
_Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
# rows [begin, end) of a mask
_Rows = Callable[[int, int], Tensor | None]
# the largest and the smallest number of queries per call; between these bounds, the number of scores of all heads
_MOST, _LEAST, _SCORES = 256, 32, 2**23


class AttentionRowsFunction(torch.autograd.Function):
    """Variant "rows": keeps q, k and v; each block of queries runs again in backward, and is differentiated there."""

    @staticmethod
    def forward(
        ctx: Any, attend: _Attend, mask: Tensor | None, step: int, q: Tensor, k: Tensor, v: Tensor, codec: Codec,
        own: Snapshot, *weights: Tensor,
    ) -> Tensor:  # fmt: skip
        (out,) = result_in_region(lambda: (_in_rows(attend, mask, step, q, k, v),))
        kept, ctx.rows_of = _kept_of(mask)
        records = [whole_record_of(x, codec) for x in (q, k, v)]
        save(ctx, *records, None if kept is None else stored_exact(kept), *map(stored_exact, weights))
        ctx.again = SameAutocast(own.run, q)
        ctx.step = step
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, kept, *weights = load(ctx, dout)
        needed = (*ctx.needs_input_grad[3:6], *ctx.needs_input_grad[8:])
        mask = ctx.rows_of(kept)
        dq = torch.empty_like(q) if needed[0] else None
        # all blocks add to the sums for these
        shared = (k, v, *weights)
        sums = [_zeros(x) if wanted else None for x, wanted in zip(shared, needed[1:], strict=True)]
        for rows in tiles(q, ctx.step):
            leaves = [alias(x, wanted) for x, wanted in zip((q[:, :, rows], *shared), needed, strict=True)]
            with torch.enable_grad():
                out = ctx.again(leaves[3:], *leaves[:3], mask(rows.start, rows.stop))
            found = torch.autograd.grad(out, [x for x in leaves if x.requires_grad], dout[:, rows], allow_unused=True)
            del out
            grads = iter(found)
            if dq is not None:
                dq[:, :, rows] = next(grads)
            for total in sums:
                if total is not None and (grad := next(grads)) is not None:
                    total.add_(grad)
            del found, grads  # before the next ones are made
        dk, dv, *dweights = (None if s is None else s.to(x.dtype) for s, x in zip(sums, shared, strict=True))
        return None, None, None, dq, dk, dv, None, None, *dweights


def _kept_of(mask: Tensor | None) -> tuple[Tensor | None, Callable[[Tensor | None], _Rows]]:
    """What is kept of a mask, and the function that makes its rows from that."""
    if isinstance(mask, PackedMask):
        return mask.bounds(), partial(MaskRows, mask.sequences, mask.window, mask.dtype, device=mask.device)
    return mask, partial(partial, _rows_of)


def _rows_of(mask: Tensor | None, begin: int, end: int) -> Tensor | None:
    """Rows of a mask that has memory; one row serves all queries."""
    return mask if mask is None or mask.size(-2) == 1 else mask[..., begin:end, :]


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))


def _rows_at_a_time(q: Tensor, k: Tensor) -> int:
    scores = q.size(0) * q.size(1) * k.size(2)
    return min(_MOST, max(_LEAST, _SCORES // scores // _LEAST * _LEAST))


@torch.no_grad()
def _in_rows(attend: _Attend, mask: Tensor | None, step: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, T, H, Dv], contiguous."""
    out: Tensor | None = None
    kept, rows_of = _kept_of(mask)
    mask_rows = rows_of(kept)
    for rows in tiles(q, step):
        part = attend(q[:, :, rows], k, v, mask_rows(rows.start, rows.stop))
        if out is None:
            out = part.new_empty(q.size(0), q.size(2), *part.shape[2:])
        out[:, rows] = part
    assert out is not None
    return out


def attention_rows(
    attend: _Attend,
    mask: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own: Snapshot | None = None,
    *,
    step: int | None = None,
    codec: Codec = IDENTITY,
) -> Tensor:
    """``attend(q, k, v, mask)``, some queries at a time. The output of a query must not depend on other queries.

    Args:
        attend: Stock's attention, which takes k and v with their own heads and an additive mask.
        mask: Which tokens see which: additive, [1 or B, 1 or H, 1 or T, Tk]; None: all see all. The values of a
            `PackedMask` are computed only for the rows of one call at a time.
        q: ``[B, H, T, D]``.
        k, v: ``[B, Hkv, Tk, D]``.
        own: The module whose attention that is, as it is now, and its weights, such as gpt-oss's sinks. Its code runs
            in backward. None: no module is read.
        step: How many queries at a time; None: by the size of their scores.
        codec: How q, k and v are stored.

    Returns:
        ``[B, T, H, D]``.

    Saves:
        q, k, v and the mask; of a `PackedMask` the bounds of its sequences. No scores, no probabilities.

    Gradient:
        Exact: stock's own ops compute each block, and sums over blocks are in fp32. First order only.
    """
    step, own = step or _rows_at_a_time(q, k), own or of_function(attend)
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in (q, k, v, *own.tensors)):
        # this includes the first run of a layer under reentrant checkpointing
        return result_in_region(lambda: (_in_rows(attend, mask, step, q, k, v),))[0]
    return applied(AttentionRowsFunction, attend, mask, step, q, k, v, codec, own, *own.tensors)
