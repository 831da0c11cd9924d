"""The gradient of logits: a sum over functions of the logits, computed a few rows at a time and never whole.

Autograd sees an ordinary tensor. The ops of autograd nodes between a function of the logits and their head (slices,
casts, scales, sums of several gradients) are only recorded; every other op gets the gradient's values as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..private_apis import without_torch_function
from ..reference.linear_rows import matrix_slices
from .deferred_logits import MEMORY, POINTWISE_OPS, ROW_OPS, empty_like, keeps_device
from .deferred_values import DeferredOp
from .gradient_parts import Chunk, GradientPart, Leaf, Mapped, Total, rows_of
from .row_set import RowSet, add_at, rows_at, shifted

aten = torch.ops.aten


class LogitsGradient(Tensor):
    """A gradient with the shape of logits ``[..., V]``, whose values `part` computes.

    `part` numbers rows as in the source. Row ``at[k]`` of this tensor is row ``source_rows[k]`` of `part`, and the
    other rows are zero. If `at` is None, each row k of this tensor is row ``source_rows[k]`` of `part`.
    """

    part: GradientPart
    origin: Any
    source_rows: Tensor
    at: Tensor | None

    @staticmethod
    def __new__(
        cls, part: GradientPart, origin: Any, like: Tensor, source_rows: Tensor, at: Tensor | None = None
    ) -> LogitsGradient:
        x: LogitsGradient = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, strides=like.stride(), dtype=part.dtype, device=origin.device
        )
        x.part, x.origin, x.source_rows, x.at = part, origin, source_rows, at
        return x

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.dense())

    @torch.no_grad()
    def dense(self) -> Tensor:
        """The values, as a plain tensor."""
        width = self.size(-1)
        out = torch.zeros((self.numel() // width, width), dtype=self.dtype, device=self.device)
        rows, read = RowSet(self.source_rows), self.origin.read()
        for piece in matrix_slices(self.part.stop - self.part.start, width):
            first, last = self.part.start + piece.start, self.part.start + piece.stop
            found = rows.within(first, last)
            dy = out.new_zeros((last - first, width))
            if found is not None and self.part.add_to(dy, first, Chunk(read)):
                own, ours = found
                add_at(out, own if self.at is None else self.at[own], rows_at(dy, shifted(ours, first)))
            del dy  # before the next one is made
        return out.view(self.shape)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in MEMORY:
            args, kwargs = dense((args, kwargs or {}))
            return func(*args, **kwargs)
        with without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.record_stream.default:
            return None
        x = args[0] if args else None
        known = _of_one(x, func, args[1:], kwargs) if isinstance(x, LogitsGradient) else None
        if known is None and func is aten.add.Tensor and not kwargs:
            known = _sum(*args)
        if known is None and func in (aten.stack.default, aten.cat.default):
            known = _joined(func, *args, **kwargs)
        if known is not None:
            return known
        args, kwargs = dense((args, kwargs))
        return func(*args, **kwargs)


_BACKWARD_OPS = {
    aten.slice_backward.default: aten.slice.Tensor,
    aten.select_backward.default: aten.select.int,
}


def dense(value: Any) -> Any:
    """The value with each gradient in it as a plain tensor."""
    return tree_map_only(LogitsGradient, lambda x: x.dense(), value)


def _of_one(x: LogitsGradient, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LogitsGradient | None:
    """The result of an autograd node's op on the one gradient x; None if the op needs the values."""
    if func in _BACKWARD_OPS:
        return _spread(x, func, *args)
    if func in ROW_OPS:
        y = func(empty_like(x), *args, **kwargs)
        if y.numel() != x.numel() or y.dim() == 0 or y.size(-1) != x.size(-1):
            return None
        return LogitsGradient(x.part, x.origin, y, x.source_rows, x.at)
    if func in POINTWISE_OPS and func is not aten.tanh.default:
        return _scaled(x, func, args, kwargs)
    return None


def _spread(x: LogitsGradient, func: Any, sizes: Any, dim: int, *place: Any) -> LogitsGradient | None:
    """The gradient of a tensor, from the gradient x of a part that was taken from it along `dim`."""
    like = torch.empty(sizes, dtype=x.dtype, device="meta")
    if like.dim() == 0 or dim in (-1, like.dim() - 1):
        return None
    numbers = torch.arange(like.numel() // like.size(-1)).view(*like.shape[:-1], 1)
    at = _BACKWARD_OPS[func](numbers, dim, *place).reshape(-1)
    return LogitsGradient(x.part, x.origin, like, x.source_rows, at if x.at is None else at[x.at])


def _scaled(x: LogitsGradient, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LogitsGradient | None:
    """x cast, or times a number."""
    step = DeferredOp(func, args, kwargs)
    if any(isinstance(a, Tensor) for a in args) or not keeps_device(step, x):
        return None
    like = step(empty_like(x))
    part = Mapped(x.part, lambda dy, chunk, rows: step(dy), like.dtype, None)
    return LogitsGradient(part, x.origin, like, x.source_rows, x.at)


def _sum(x: Any, y: Any) -> LogitsGradient | None:
    """x + y, for two gradients of one tensor."""
    if not isinstance(x, LogitsGradient):
        x, y = y, x
    if not isinstance(y, Tensor) or x.shape != y.shape or x.dtype != y.dtype:
        return None
    if isinstance(y, LogitsGradient):
        return _gathered([(x, x.at), (y, y.at)], x) if x.origin is y.origin else None
    if x.at is not None:  # here it is not known to which rows of the source the other rows of y belong
        return None
    whole = Leaf(RowSet(x.source_rows), y.dtype, rows_of(y.detach()))
    return LogitsGradient(Total((x.part, whole)), x.origin, x, x.source_rows)


def _joined(func: Any, tensors: Any, dim: int = 0) -> LogitsGradient | None:
    """The gradient of a tensor, from the gradients of its parts. None if their values are needed."""
    if not all(isinstance(x, LogitsGradient) and x.origin is tensors[0].origin for x in tensors):
        return None
    like = func([empty_like(x) for x in tensors], dim)
    if dim in (-1, like.dim() - 1) or len({x.dtype for x in tensors}) > 1:
        return None
    sizes = [x.numel() // x.size(-1) for x in tensors]
    numbers = torch.split(torch.arange(sum(sizes)), sizes)
    pieces = [own.view(*x.shape[:-1], 1) for own, x in zip(numbers, tensors, strict=True)]
    # the new position of each row; the rows are numbered piece by piece
    places = torch.split(func(pieces, dim).reshape(-1).argsort(), sizes)
    placed = [(x, at if x.at is None else at[x.at]) for x, at in zip(tensors, places, strict=True)]
    return _gathered(placed, like)


def _gathered(placed: Sequence[tuple[LogitsGradient, Tensor | None]], like: Tensor) -> LogitsGradient:
    """The sum of gradients; each comes with the rows of `like` that it covers (None: all)."""
    part = Total([x.part for x, _ in placed])
    for x, at in placed:
        if at is None:
            return LogitsGradient(part, x.origin, like, x.source_rows)
    at = torch.cat([at for _, at in placed if at is not None])
    rows = torch.cat([x.source_rows for x, _ in placed])
    at, order = at.sort(stable=True)
    first = torch.ones_like(at, dtype=torch.bool)
    first[1:] = at[1:] != at[:-1]
    at, rows = at[first], rows[order][first]
    everywhere = at.numel() == like.numel() // like.size(-1)
    return LogitsGradient(part, placed[0][0].origin, like, rows, None if everywhere else at)
