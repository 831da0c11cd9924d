"""Rows that a program keeps nothing of: padding (`drop_padding`), or rows that repeat others (`share_prompts`).

All rows are computed, forward and backward. But of each activation that the program makes and keeps, only some rows are
picked; the code for that is part of the program. In backward these rows are put back among zeros (padding), or each one
in all the places where it is repeated. The leaf path checks the gradient of each op. Here it is enough to check the
gradients of the program's outputs: all operations but attention compute each row by itself, so a row without a gradient
has none anywhere in the layer, as long as no real token attends to padding. For the same reason, rows that should be
equal are compared in the layers' inputs alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from ..ops.heads import seen_by_real
from ..records import Derived, Padding, Recipe, Record, RepeatedRows, Stored, rows_left_out, stored_exact
from ..records.padding import RealRows
from ..records.repeated_rows import SharedRows
from ..records.saving import Leaves
from .emit import Emitter

# layouts, which say where an activation has its tokens: [B, T, ...], [B * T, ...], or [B, H, T, ...]
TOKENS_FIRST, ROWS, HEADS = "tokens", "rows", "heads"


class LeftOut(NamedTuple):
    """The rows that one call of a layer leaves out, and whether real tokens see padding: a bool tensor [], or None."""

    rows: Padding | RepeatedRows
    seen: Tensor | None = None

    def picked(self, device: torch.device) -> Tensor:
        """The indices of the rows that are kept."""
        if isinstance(self.rows, RepeatedRows):
            return self.rows.indices(device)[0]
        return self.rows.order(device)[: self.rows.real]

    def saved(self, device: torch.device) -> Tensor:
        """The tensor that is saved so that backward can bring all rows back."""
        return self.rows.indices(device)[1] if isinstance(self.rows, RepeatedRows) else self.rows.order(device)

    @property
    def back(self) -> RealRows | SharedRows:
        """The function that brings all rows back from the kept rows and the tensor `saved`."""
        if isinstance(self.rows, RepeatedRows):
            return SharedRows(self.rows.guard, torch.Size(self.rows.shape))
        return RealRows(self.rows.guard, self.rows.mask.shape, self.rows.real)

    def record(self, rows: Tensor | Stored, device: torch.device) -> Record:
        """The record of an activation [B, T, ...] of which these rows are kept."""
        few = rows if isinstance(rows, Stored) else stored_exact(rows)
        return Derived(Recipe(self.back), (few, stored_exact(self.saved(device))))


def left_out_of(x: Tensor) -> LeftOut | None:
    """The rows of a layer's input [B, T, C] that are left out in this forward; None if all are kept."""
    rows = rows_left_out(x)
    return None if rows is None else LeftOut(rows)


def with_attentions(left_out: LeftOut, masks: Sequence[Tensor | None], causal: bool) -> LeftOut | None:
    """The rows that a program with attentions leaves out; None if it has to keep all rows.

    Padding may be left out only if no real token attends to it. `seen` says whether one does, and the backward checks
    it. `seen` is computed from the masks, or, in causal attention without a mask, from the places of padding.
    """
    padding = left_out.rows
    if isinstance(padding, RepeatedRows):
        return left_out
    if not causal and any(mask is None for mask in masks):
        return None
    seen = [seen_by_real(padding, mask) for mask in masks]
    return LeftOut(padding, seen[0] if len(seen) == 1 else torch.stack(seen).any())


def picked(x: Tensor, rows: Tensor, layout: str) -> Tensor:
    """A function in the forward's code: some rows of an activation of this layout."""
    if layout == HEADS:
        x = x.transpose(1, 2)
    return (x if layout == ROWS else x.flatten(0, 1)).index_select(0, rows)


def restored(rows: Tensor, spread: tuple[RealRows | SharedRows, Tensor], layout: str) -> Tensor:
    """A function in the backward's code: the activation from which the rows were picked, with all of its rows."""
    back, saved = spread
    if layout == ROWS:
        return back.flat(rows, saved)
    x = back(rows, saved)
    return x.transpose(1, 2) if layout == HEADS else x


def seen_as(e: Emitter, x: Node, layout: str, like: Tensor) -> Node:
    """Write down the view of an activation [B, T, ...] in this layout."""
    if layout == ROWS:
        return e.call(torch.flatten, x, 0, 1, like=lambda *_: like)
    return e.call(torch.transpose, x, 1, 2, like=lambda *_: like) if layout == HEADS else x


@dataclass(frozen=True)
class Left:
    """What the backward of a program knows of the rows that were left out. It holds no tensor.

    Attributes:
        back: The function that brings all rows of an activation back.
        rows: The position, among the saved tensors, of the tensor that `back` needs.
        seen: The position of the tensor that says whether real tokens see padding; None if there is none.
    """

    back: RealRows | SharedRows
    rows: int
    seen: int | None

    @classmethod
    def of(cls, left_out: LeftOut, device: torch.device, leaves: Leaves, first: int) -> Left:
        """Add what it needs to the leaves of a program, of which the first one is saved at the position `first`."""
        rows = first + leaves.add(left_out.saved(device))
        return cls(left_out.back, rows, None if left_out.seen is None else first + leaves.add(left_out.seen))

    def spread(self, saved: Sequence[Any]) -> tuple[RealRows | SharedRows, Tensor]:
        """What brings all rows back in one backward."""
        return self.back, saved[self.rows]

    def check(self, saved: Sequence[Any], grads: Sequence[Tensor | None], layouts: Sequence[str | None]) -> None:
        """Note the gradients of the outputs, the last one first, in the guard, which raises at the end of backward."""
        if isinstance(self.back, SharedRows):
            return
        for grad, layout in zip(grads, reversed(layouts), strict=True):
            if grad is not None:
                self.back.check(saved[self.rows], grad.transpose(1, 2) if layout == HEADS else grad)
        if self.seen is not None:
            self.back.guard.note_attention(saved[self.seen])
