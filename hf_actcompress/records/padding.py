"""Padding rows are not kept: an activation x [B, S, ...] comes back from its real rows, with zeros in between.

That is exact if no gradient reaches a padding row. A zero row of dy adds nothing to a weight's gradient, and gives a
zero row of dx whatever x was there, as long as x is finite, which zeros and values computed from them are. Only
attention combines rows (ops/heads.py). The shape alone decides whether x has padding rows, so a guard makes this safe:
each op hands its incoming gradient to `load`, and if one is not zero on a dropped row, an error is raised when backward
ends. NaN and inf raise no error here: they reach the weights' gradients whatever x is, and loss scaling looks for them
there.

In a region under `torch.utils.checkpoint` nothing is dropped. The region runs again in backward and has to save the
same tensors then, but in backward no forward is in progress that says which rows are padding.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from ..codecs import IDENTITY, Codec
from ..compiling import is_compiling
from ..errors import PaddingError
from .guard import Guard
from .outside import hooks_outside
from .record import Derived, Pending, Recipe, Record, Stored, stored_exact
from .repeated_rows import RepeatedRows, SharedRows

_GRADIENT = "a gradient of magnitude {:.3g} reached a padding row, e.g. of a loss over all positions"
_ATTENTION = "an attention mask lets real tokens attend to padding"


class PaddingGuard(Guard):
    """Raises an error at the end of a backward that needed rows which were dropped."""

    __slots__ = ()

    def note_gradient(self, dy: Tensor, padding_rows: Tensor, total: int) -> None:
        """Note that dy [..., *], whose leading dimensions make `total` rows, must be zero on `padding_rows`."""
        worst = torch.linalg.vector_norm(dy.reshape(total, -1).index_select(0, padding_rows), torch.inf)
        self.note(_GRADIENT, worst.float().nan_to_num(0.0, 0.0, 0.0))

    def note_attention(self, seen: Tensor) -> None:
        """seen [], bool: whether a real token has attended to padding."""
        self.note(_ATTENTION, seen.float())

    def fail(self, sizes: dict[str, float]) -> None:
        reasons = "; ".join(what.format(size) for what, size in sizes.items())
        raise PaddingError(
            f"drop_padding=True does not keep padding rows for backward, and {reasons}. The gradients of this backward "
            "are wrong: zero them. Set labels to -100 where attention_mask is 0 (with padding on the left also that of "
            "the first real token, which padding predicts) and pool with the mask, or patch with drop_padding=False"
        )


class Padding:
    """Which rows of the batch in the forward in progress are padding."""

    __slots__ = ("_made", "_orders", "guard", "mask", "real", "shape")

    def __init__(self, mask: Tensor, real: int) -> None:
        self.mask, self.real, self.guard = mask, real, PaddingGuard()  # mask [B, S], bool, True for real
        self.shape = mask.shape
        self._orders: dict[torch.device, Tensor] = {}
        self._made: list[tuple[weakref.ref[Tensor], int, Tensor]] = []

    def order(self, device: torch.device) -> Tensor:
        """[B * S] int64: the real rows, then the padding rows; on another device it is a copy, made once."""
        if not self._orders:
            padded = self.mask.logical_not().flatten().to(torch.uint8)
            self._orders[self.mask.device] = padded.argsort(stable=True)
        if device not in self._orders:
            self._orders[device] = self._orders[self.mask.device].to(device)
        return self._orders[device]

    def once(self, x: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """The result of `make`, which is called once per forward for each x."""
        for known, version, made in self._made:
            if known() is x and version == x._version:
                return made
        made = make()
        self._made.append((weakref.ref(x), x._version, made))
        return made


def padding_of(mask: Tensor) -> Padding | None:
    """The padding of a mask [B, S], not zero for real tokens; None if there is none to drop. Waits for the device."""
    with torch.no_grad():
        real = mask != 0
        count = int(real.sum())
    # a mask without any real token must mean something else
    return Padding(real, count) if 0 < count < real.numel() else None


class _State(threading.local):
    def __init__(self) -> None:
        self.rows: Padding | RepeatedRows | None = None


_state = _State()


@contextmanager
def dropping(rows: Padding | RepeatedRows | None) -> Iterator[None]:
    """While the block runs in this thread, these rows are not kept: padding, or rows that repeat others."""
    before = _state.rows
    _state.rows = rows
    try:
        yield
    finally:
        _state.rows = before


def rows_left_out(x: Tensor, indices: bool = False) -> Padding | RepeatedRows | None:
    """The rows of x [B, S, ...], or of `indices` [B, S], that are not kept in this forward; None for any other x."""
    rows = _state.rows
    if rows is None or is_compiling():
        return None
    fits = x.dim() >= (2 if indices else 3) and x.shape[:2] == rows.shape and x.numel() > 0
    return rows if fits and not checkpointed() else None


def rows_in_force() -> Padding | RepeatedRows:
    """The rows that are not kept in the forward in progress, which leaves some out."""
    rows = _state.rows
    assert rows is not None, "no rows are left out in this forward"
    return rows


def padding_in(x: Tensor) -> Padding | None:
    """The padding whose rows of x are dropped in this forward, or None."""
    rows = rows_left_out(x)
    return rows if isinstance(rows, Padding) else None


def shares_rows(x: Tensor) -> bool:
    """Whether rows of x [B, S, ...] that repeat others are kept only once in this forward."""
    return isinstance(rows_left_out(x), RepeatedRows)


def checkpointed() -> bool:
    """Whether this is a region under `torch.utils.checkpoint`, in its forward or when it runs again."""
    top = hooks_outside()
    return top is not None and getattr(top[0], "__module__", None) == "torch.utils.checkpoint"


def keep(x: Tensor, codec: Codec) -> Record:
    """The record of x itself through `codec`, without its padding rows and repeated ones where these are left out."""
    return _keep(x, codec, rows_left_out(x))


def keep_later(x: Tensor, codec: Codec) -> Record:
    """As `keep`, but nothing is packed until the first consumer saves the record."""
    rows = rows_left_out(x)
    fewer = rows is not None and codec.takes_rows
    if codec == IDENTITY and not fewer:
        return stored_exact(x)
    dropped = fewer and isinstance(rows, Padding)
    return Pending(x, partial(_keep, codec=codec, without=rows), dropped=dropped, lossless=codec.lossless)


def _keep(x: Tensor, codec: Codec, without: Padding | RepeatedRows | None) -> Record:
    if isinstance(without, RepeatedRows) and codec.takes_rows:
        different, numbers, excess = without.taken(x.detach())
        shared = SharedRows(without.guard, x.shape)
        return Derived(
            Recipe(shared), (Stored(codec, *codec.pack(different)), stored_exact(numbers), stored_exact(excess))
        )
    padding = without if isinstance(without, Padding) else None
    if padding is not None and codec.mixes_rows and x.dim() == 3:
        # all rows stay in place
        return Stored(codec, *codec.pack_real(x.detach(), padding.mask.to(x.device)))
    if padding is None or not codec.takes_rows:
        return Stored(codec, *codec.pack(x.detach()))
    order = padding.order(x.device)
    rows = x.detach().flatten(0, 1).index_select(0, order[: padding.real])
    back = RealRows(padding.guard, x.shape, padding.real)
    return Derived(Recipe(back), (Stored(codec, *codec.pack(rows)), stored_exact(order)))


class RealRows:
    """Recompute function of x [B, S, ...] from its real rows; all other rows are zeros."""

    __slots__ = ("guard", "real", "shape")

    def __init__(self, guard: PaddingGuard, shape: torch.Size, real: int) -> None:
        self.guard, self.shape, self.real = guard, shape, real

    @property
    def total(self) -> int:
        return self.shape[0] * self.shape[1]

    def __call__(self, rows: Tensor, order: Tensor) -> Tensor:
        return self.flat(rows, order).view(*self.shape[:2], *rows.shape[1:])

    def flat(self, rows: Tensor, order: Tensor) -> Tensor:
        """The same as [B * S, ...]."""
        x = rows.new_zeros((self.total, *rows.shape[1:]))
        return x.index_copy_(0, order[: self.real], rows)

    def check(self, order: Tensor, dy: Tensor, of: Tensor | None = None) -> None:
        """Note dy [B, S, ...] in the guard, or dy [K] that belongs to the rows `of` [K]."""
        if of is not None:
            dy = dy.new_zeros(self.total).index_add_(0, of, dy.abs())
        self.guard.note_gradient(dy, order[self.real :], self.total)


def is_dropped(record: Record) -> bool:
    """Whether the record gives zeros, or values computed from zeros, for padding rows."""
    if isinstance(record, Stored):
        return False
    if isinstance(record, Pending):
        return record.dropped
    # most sources are stored; a call for each of them would cost more than the look
    dropped = [source for source in record.sources if type(source) is not Stored and is_dropped(source)]
    return bool(dropped) or isinstance(record.recipe.recompute, RealRows)


def restores_rows(record: Record) -> bool:
    """Whether the record is that of rows, to which the others are added when it is read."""
    return isinstance(record, Derived) and isinstance(record.recipe.recompute, (RealRows, SharedRows))
