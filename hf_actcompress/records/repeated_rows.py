"""Rows of the batch that repeat an earlier row are kept once: the prompt of a group of completions.

Under causal attention a token's hidden states depend only on it and the tokens before it. Where sequences of a batch
begin with the same tokens (GRPO's groups, the two answers of DPO), an activation x [B, S, ...] has the same rows
there, and is rebuilt from the rows that differ. A row of a product may differ by rounding from its repetition at
another place of the matrix, as it may differ on another device. A larger difference is an error. Dropout and attention
in both directions are detected before the forward (models/rows_left_out.py). In addition, each record compares a few
features of the rows when it is made; an error is raised when backward reads it.

In a region under `torch.utils.checkpoint` all rows are kept, as under `drop_padding` (padding.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import SharedRowsError
from .guard import Guard

# the first and the last features are compared. A difference up to this share of the largest feature is accepted: it
# covers 16-bit roundings that have gone through many layers
_COMPARED, _APART = 8, 0.1
# the smallest share of repeated rows at which rows are shared; with fewer, only the special token that begins each
# sequence may be repeated
_WORTH = 1 / 8


class RepetitionGuard(Guard):
    """Raises an error at the end of a backward that has read rows which were wrongly taken for repetitions."""

    __slots__ = ()

    def fail(self, sizes: dict[str, float]) -> None:
        raise SharedRowsError(
            "share_prompts=True keeps rows of tokens once that begin several sequences of the batch, and they were not "
            "the same in a layer: something draws for each row, or tokens see what follows them. The gradients of this "
            "backward are wrong: zero them, and patch with share_prompts=False"
        )


class RepeatedRows:
    """Which rows of the batch in the forward in progress repeat another one.

    Args:
        shape: B, S.
        first: int64 [B * S] on the CPU: for each row the row that it repeats, or its own number.
    """

    __slots__ = ("_indices", "guard", "shape")

    def __init__(self, shape: tuple[int, int], first: Tensor) -> None:
        self.shape, self.guard = shape, RepetitionGuard()
        own = first == torch.arange(first.numel())
        repeated = (~own).nonzero()[:, 0]
        numbers = (own.cumsum(0) - 1)[first]
        self._indices: dict[torch.device, tuple[Tensor, ...]] = {}
        self._indices[first.device] = (own.nonzero()[:, 0], numbers, repeated, first[repeated])

    def indices(self, device: torch.device) -> tuple[Tensor, ...]:
        """(rows that are kept, each row's index among them, rows that are not kept, the rows that these repeat)."""
        if device not in self._indices:
            self._indices[device] = tuple(x.to(device, non_blocking=True) for x in self._indices[torch.device("cpu")])
        return self._indices[device]

    def taken(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From x [B, S, ...]: the kept rows, each row's index among them, and how much rows differ beyond rounding."""
        rows, numbers, repeated, originals = self.indices(x.device)
        flat = x.flatten(0, 1)
        features = flat.flatten(1)
        some = torch.cat([features[:, :_COMPARED], features[:, -_COMPARED:]], dim=1)
        if not some.is_floating_point():
            return flat.index_select(0, rows), numbers, some.new_zeros((), dtype=torch.float32)
        apart = some.index_select(0, repeated) - some.index_select(0, originals)
        # NaN and inf raise no error here: they reach the gradients whatever x is
        excess = (apart.abs().amax() - _APART * some.abs().amax()).float().nan_to_num(0.0, 0.0, 0.0)
        return flat.index_select(0, rows), numbers, excess


class SharedRows:
    """Recompute function of x [B, S, ...] from the rows that are kept."""

    __slots__ = ("guard", "shape")

    def __init__(self, guard: RepetitionGuard, shape: torch.Size) -> None:
        self.guard, self.shape = guard, shape

    def __call__(self, rows: Tensor, numbers: Tensor, excess: Tensor | None = None) -> Tensor:
        if excess is not None:
            self.guard.note("excess", excess)
        return self.flat(rows, numbers).view(*self.shape[:2], *rows.shape[1:])

    def flat(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """The same as [B * S, ...]."""
        return rows.index_select(0, numbers)


def repeated_rows_of(tokens: Sequence[Tensor], real: Tensor | None = None) -> RepeatedRows | None:
    """The repeated rows of a batch. Waits for the device. None if there are too few of them.

    Args:
        tokens: All tensors [B, S] that say what a token is (ids, mask, positions).
        real: [B, S], zero for padding; None if there is none. Padding never counts as a repetition, because a model may
            let it attend to anything.
    """
    known = [x.detach().cpu() for x in tokens]
    batch, length = known[0].shape[:2]
    own = torch.arange(batch * length).view(batch, length)
    first = own.clone()
    for row in range(1, batch):
        same = torch.stack([(x[:row] == x[row]) for x in known]).all(0)
        # how many tokens at the start are equal in each earlier sequence and this one
        common = torch.where(same.all(1), length, same.to(torch.uint8).argmin(1))
        other = int(common.argmax())
        count = int(common[other])
        first[row, :count] = first[other, :count]
    if real is not None:
        padding = real.cpu() == 0
        first[padding] = own[padding]
    repeated = int((first != own).sum())
    return RepeatedRows((batch, length), first.flatten()) if repeated >= _WORTH * first.numel() else None
