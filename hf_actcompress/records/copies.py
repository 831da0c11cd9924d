"""Rows of the batch that repeat an earlier row are kept once: the prompt of a group of completions.

Under causal attention a token's hidden states depend on it and the tokens before it alone. Where sequences of a batch
begin with the same tokens (GRPO's groups, the two answers of DPO), an activation x [B, S, ...] has the same rows
there, and comes back from the rows that differ. A row of a product may differ by rounding from its repetition in
another place of the matrix, as it may differ on another device; anything more is an error, such as a dropout mask or
attention in both directions. So each record compares a few features of the rows when it is made, and raises when
backward reads it.

In a region under `torch.utils.checkpoint` all rows are kept, as under `drop_padding` (padding.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..errors import SharedRowsError
from ..private_apis import at_end_of_backward, current_backward

# features that are compared, and how far apart they may be, relative to the largest of them: roundings of 16 bits that
# have gone through many layers
_COMPARED, _APART = 16, 0.1
# rows that have to be saved at least, as a share: each sequence begins with the same special token
_WORTH = 1 / 8


class Guard:
    """Raises at the end of a backward in which rows were read that were no repetitions."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[int, Tensor] = {}

    def note(self, excess: Tensor) -> None:
        """excess [], above zero where rows differed."""
        task = current_backward()
        if task == -1:
            _raise_if(excess)
        elif task in self._found:
            self._found[task] = torch.maximum(self._found[task], excess)
        else:
            self._found[task] = excess
            at_end_of_backward(lambda: _raise_if(self._found.pop(task)))


def _raise_if(excess: Tensor) -> None:
    # the one time in a backward that the host waits
    if float(excess) > 0:
        raise SharedRowsError(
            "share_prompts=True keeps rows of tokens once that begin several sequences of the batch, and they were not "
            "the same in a layer: something draws for each row (dropout), or tokens see what follows them. The "
            "gradients of this backward are wrong: zero them, and set dropout to 0 (of adapters, too) or patch with "
            "share_prompts=False"
        )


class Copies:
    """Which rows of the batch in the forward in progress repeat another one.

    Args:
        shape: B, S.
        first: int64 [B * S]: the row that each repeats, itself if none.
    """

    __slots__ = ("_indices", "first", "guard", "kept", "shape")

    def __init__(self, shape: tuple[int, int], first: Tensor) -> None:
        self.shape, self.first, self.guard = shape, first, Guard()
        own = first == torch.arange(first.numel(), device=first.device)
        number = own.cumsum(0) - 1
        # the rows that are kept, of each row its number among them, and the rows that are not
        self._indices = {first.device: (own.nonzero()[:, 0], number[first], (~own).nonzero()[:, 0])}
        self.kept = self._indices[first.device][0].numel()

    def indices(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        if device not in self._indices:
            rows, numbers, repeated = next(iter(self._indices.values()))
            self._indices[device] = rows.to(device), numbers.to(device), repeated.to(device)
        return self._indices[device]

    def fits(self, x: Tensor) -> bool:
        """Whether x is [B, S, ...]."""
        return x.dim() > 2 and x.shape[:2] == self.shape and x.numel() > 0

    def taken(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of x [B, S, ...]: the rows that are kept, of each row its number among them, by how much rows differ."""
        rows, numbers, repeated = self.indices(x.device)
        flat = x.flatten(0, 1)
        some = flat.flatten(1)[:, :_COMPARED]
        if not some.is_floating_point():
            return flat.index_select(0, rows), numbers, some.new_zeros((), dtype=torch.float32)
        apart = some[repeated] - some[self.first.to(x.device)[repeated]]
        # NaN and inf are let through: they reach the gradients with any x
        excess = (apart.abs().amax() - _APART * some.abs().amax()).float().nan_to_num(0.0, 0.0, 0.0)
        return flat.index_select(0, rows), numbers, excess


class SharedRows:
    """Recompute function of x [B, S, ...] from the rows that are kept."""

    __slots__ = ("guard", "shape")

    def __init__(self, guard: Guard, shape: torch.Size) -> None:
        self.guard, self.shape = guard, shape

    def __call__(self, rows: Tensor, numbers: Tensor, excess: Tensor) -> Tensor:
        self.guard.note(excess)
        return rows.index_select(0, numbers).view(self.shape)


class _State(threading.local):
    def __init__(self) -> None:
        self.copies: Copies | None = None


_state = _State()


@contextmanager
def sharing(copies: Copies | None) -> Iterator[None]:
    """While the block runs in this thread, the rows that repeat others are not kept."""
    before = _state.copies
    _state.copies = copies
    try:
        yield
    finally:
        _state.copies = before


def current_copies() -> Copies | None:
    """The repeated rows of the forward in progress."""
    return _state.copies


def copies_of(tokens: Sequence[Tensor]) -> Copies | None:
    """The repeated rows of a batch, out of all [B, S] that say what a token is (ids, mask, positions).

    Waits for the device. None if there are too few of them.
    """
    with torch.no_grad():
        same = torch.stack([x[:, None] == x[None] for x in tokens])
        common = same.all(0).cumprod(-1).sum(-1).tolist()
    batch, length = tokens[0].shape[:2]
    first = torch.arange(batch * length).view(batch, length)
    for row in range(1, batch):
        other = max(range(row), key=lambda r: common[row][r])
        first[row, : common[row][other]] = first[other, : common[row][other]]
    repeated = int((first.flatten() != torch.arange(batch * length)).sum())
    return Copies((batch, length), first.flatten().to(tokens[0].device)) if repeated >= _WORTH * first.numel() else None
