"""Rows that a program keeps nothing of: padding (`drop_padding`), or rows that repeat others (`share_prompts`).

All rows are computed, forward and backward. What is kept of an activation goes through `records.keep`, as in the leaf
path, and comes back with zeros for padding, or with the repeated rows in their places. The leaf path checks the
gradient of each op. Here those of the program's outputs are enough: all operations but attention compute each row by
itself, so a row without a gradient has none anywhere in the layer, as long as no real token attends to padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from ..codecs import Codec
from ..ops.heads import seen_by_real
from ..records import Copies, Padding, Record, keep, rows_left_out
from ..records.padding import RealRows
from ..records.saving import Leaves
from .emit import Emitter

# where an activation has its tokens: [B, T, ...], [B * T, ...], or [B, H, T, ...]
TOKENS_FIRST, ROWS, HEADS = "tokens", "rows", "heads"


class LeftOut(NamedTuple):
    """The rows of one call of a layer that are left out, and whether real tokens see padding: [], bool, or None."""

    rows: Padding | Copies
    seen: Tensor | None = None


def left_out_of(x: Tensor) -> LeftOut | None:
    """The rows of a layer's input [B, T, C] that are left out in this forward; None if all are kept."""
    rows = rows_left_out(x)
    return None if rows is None else LeftOut(rows)


def with_attentions(left_out: LeftOut, masks: Sequence[Tensor | None], causal: bool) -> LeftOut | None:
    """The same for a program with attentions in it; None if it is unknown what real tokens see."""
    padding = left_out.rows
    if isinstance(padding, Copies):
        return left_out
    if not causal and any(mask is None for mask in masks):
        return None
    seen = [seen_by_real(padding, mask) for mask in masks]
    return LeftOut(padding, seen[0] if len(seen) == 1 else torch.stack(seen).any())


class PackingRows:
    """A function of the forward's code: the record of an activation of this layout, without rows that are left out."""

    def __init__(self, codec: Codec, layout: str) -> None:
        self.codec, self.layout = codec, layout
        # codecs that group neighbours need the next token beside each row, not the next head
        self.joins = codec.along_tokens and layout == HEADS
        self.__name__, self.__module__ = "packed_rows", __name__

    def __call__(self, x: Tensor, batch: int, tokens: int) -> Record:
        """The record of x as [B, T, ...]."""
        if self.layout == ROWS:
            x = x.view(batch, tokens, *x.shape[1:])
        elif self.layout == HEADS:
            x = x.transpose(1, 2)
        return keep(x.flatten(2) if self.joins else x, self.codec)

    def back(self, e: Emitter, x: Node, like: Tensor) -> Node:
        """Write down how the value is seen as before."""
        if self.joins:
            x = e.call(torch.unflatten, x, 2, (like.size(1), like.size(3)), like=lambda *_: like.transpose(1, 2))
        if self.layout == ROWS:
            return e.call(torch.flatten, x, 0, 1, like=lambda *_: like)
        return e.call(torch.transpose, x, 1, 2, like=lambda *_: like) if self.layout == HEADS else x


@dataclass(frozen=True)
class Check:
    """What the backward of a program looks at that has left padding out. It holds no tensor.

    Attributes:
        back: How activations come back.
        order: The position of the order of rows among the saved tensors.
        seen: The position of whether real tokens see padding; None without attention.
    """

    back: RealRows
    order: int
    seen: int | None

    def __call__(self, saved: Sequence[Any], grads: Sequence[Tensor | None], layouts: Sequence[str | None]) -> None:
        """Note the gradients of the outputs, the last one first, in the guard. It raises at the end of the backward."""
        for grad, layout in zip(grads, reversed(layouts), strict=True):
            if grad is not None:
                self.back.check(saved[self.order], grad.transpose(1, 2) if layout == HEADS else grad)
        if self.seen is not None:
            self.back.guard.note_attention(saved[self.seen])


def check_of(leaves: Leaves, left_out: LeftOut | None, first: int) -> Check | None:
    """The check of a program that has saved these leaves, the first one at the position `first`."""
    if left_out is None or not leaves.dropped:
        return None
    ((back, order),) = leaves.dropped.values()
    return Check(back, first + order, None if left_out.seen is None else first + leaves.add(left_out.seen))
