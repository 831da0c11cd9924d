"""Rotary position embeddings of queries and keys, in one pass each; keeps the angles, which all layers share."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..dispatch import implementation
from ..records import (
    Derived,
    Record,
    Stored,
    applied,
    declare_in_order,
    is_dropped,
    is_lossless,
    known_record,
    load,
    save,
    stored_exact,
)
from ..reference import rope_fwd
from .first_order import once_differentiable


class RopeFunction(torch.autograd.Function):
    """Variant "angles": keeps cos and sin by reference, and nothing of q and k.

    If a norm made q and k, so that they are derived, the outputs are derived as well.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        save(ctx, stored_exact(cos), stored_exact(sin))
        ctx.dtypes = q.dtype, k.dtype
        q_out, k_out = (implementation("rope_fwd", x)(x, cos, sin) for x in (q, k))
        for x, y in ((q, q_out), (k, k_out)):
            _declare(y, x, cos, sin)
        needed = ctx.needs_input_grad[:2]
        # the output of a frozen projection requires no gradient in stock either
        ctx.mark_non_differentiable(*(y for y, wanted in zip((q_out, k_out), needed, strict=True) if not wanted))
        return q_out, k_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = load(ctx)
        dxs = [
            implementation("rope_bwd", dy)(dy, cos, sin, dtype) if dy is not None and needed else None
            for dy, dtype, needed in zip(dys, ctx.dtypes, ctx.needs_input_grad[:2], strict=True)
        ]
        return *dxs, None, None


def _declare(y: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Declare y as x rotated, if x can be rebuilt from tensors that are kept anyway, those of a norm of queries."""
    record = known_record(x)
    if not isinstance(record, Derived) or not is_lossless(record) or is_dropped(record):
        return
    if _large_sources(record, y.numel()) <= y.nbytes:
        order = y if y.is_contiguous() else y.transpose(1, 2)
        again = partial(_rotated, swapped=order is not y)
        declare_in_order(y, order, again, record, stored_exact(cos), stored_exact(sin))


def _large_sources(record: Record, count: int) -> int:
    """Bytes of the sources that have at least `count` elements: fp32 sources may cost more than y itself."""
    if isinstance(record, Stored):
        return sum(t.nbytes for t in record.tensors if t.numel() >= count)
    return sum(_large_sources(source, count) for source in record.sources) if isinstance(record, Derived) else 0


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, swapped: bool) -> Tensor:
    """Recompute function of rotated queries or keys, whose dimensions 1 and 2 may be swapped in memory."""
    y: Tensor = implementation("rope_fwd", x)(x, cos, sin)
    return (y.transpose(1, 2) if swapped else y).contiguous()


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """``(x * cos) + (rotate_half(x) * sin)`` for x = q and k: transformers' ``apply_rotary_pos_emb``.

    Args:
        q, k: ``[B, heads, S, D]``, each with its own count of heads, or ``[B, S, heads, D]``; floating point.
        cos, sin: ``[B or 1, S, D]``, of the same dtype or another one.
        unsqueeze_dim: The dimension of the heads, 1 or 2.

    Returns:
        q and k rotated, in their shapes, bit-equal to stock; in the wider dtype of x and the angles.

    Saves:
        cos and sin by reference; one module computes them for all layers.

    Gradient:
        Exact: bit-equal to stock by the reference and by the kernel. If the angles require a gradient, too, or
        broadcast q or k to another shape, stock's ops run and autograd keeps its own graph.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    if cos.requires_grad or sin.requires_grad or not all(_keep_shape(x, cos, sin) for x in (q, k)):
        return rope_fwd(q, cos, sin), rope_fwd(k, cos, sin)
    return applied(RopeFunction, q, k, cos, sin)


def _keep_shape(x: Tensor, *angles: Tensor) -> bool:
    """Whether a product of x and the angles has x's shape."""
    dims = [(a.shape, x.shape) for a in angles]
    return all(len(s) == len(t) and all(n in (1, m) for n, m in zip(s, t, strict=True)) for s, t in dims)
