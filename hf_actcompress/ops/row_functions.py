"""Functions of the rows of logits that keep nothing of vocabulary size.

Some map each row to a row and stay deferred (log_softmax, softmax, exp, products); the others map each row to one or a
few numbers (gather, logsumexp, sum, mean) and are computed. They keep only small tensors: indices and row numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..records import applied, load, save, stored_exact
from ..reference.linear_rows import matrix_slices
from ._linear import no_view
from .autocast import SameAutocast
from .deferred_logits import DeferredLogits, mapped
from .first_order import once_differentiable
from .gradient_parts import Chunk, GradientPart, Leaf, Mapped, Steps, Times, rows_of
from .logits_gradient import LogitsGradient
from .logits_origin import HeadOrigin, ReturnedSource
from .row_set import RowSet, Where, rows_at

aten = torch.ops.aten


# dx from dy and y, all [K, V], by autograd's formulas; autograd itself does not run below a tensor subclass
MAPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "log_softmax": lambda dy, y: aten._log_softmax_backward_data(dy, y, -1, y.dtype),
    "softmax": lambda dy, y: aten._softmax_backward_data(dy, y, -1, y.dtype),
    "exp": lambda dy, y: dy * y,
}
# dx [K, V] from dy [K, n], V, and the index [K, n] if there is one
LINEAR_REDUCTIONS: dict[str, Callable[[Tensor, int, Any], Tensor]] = {
    "sum": lambda dy, width, index: dy.expand(-1, width),
    "mean": lambda dy, width, index: dy.expand(-1, width) / width,
    "gather": lambda dy, width, index: dy.new_zeros((dy.size(0), width)).scatter_add_(-1, index, dy),
}


class RowStep(SameAutocast):
    """A function of rows, with its name in one of the tables. It runs under the autocast state of its creation."""

    __slots__ = ("name",)

    def __init__(self, name: str, function: Callable[..., Tensor], x: Tensor) -> None:
        super().__init__(function, x)
        self.name = name


class _Place:
    """What the backward of a function has to know about the logits that the function read. It holds no tensor."""

    __slots__ = ("count", "dtype", "origin", "shape", "steps")

    def __init__(self, x: DeferredLogits) -> None:
        self.origin: HeadOrigin | None = _source(x).origin
        self.shape, self.dtype, self.steps = x.shape, x.dtype, x.pointwise
        self.count = x.numel() // x.size(-1)

    def gradient(self, index: Tensor | None, make: Callable[[RowSet], GradientPart]) -> LogitsGradient:
        """`make(rows)`, as the gradient of those logits."""
        rows = torch.arange(self.count) if index is None else index.flatten()
        like = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return LogitsGradient(make(RowSet(rows)), self.origin, like, rows)

    def mapped(
        self, dy: Tensor, index: Tensor | None, back: Callable[[Tensor, Chunk, Where], Tensor]
    ) -> LogitsGradient:
        """The gradient of those logits, which `back` computes from each row of dy."""

        def part(rows: RowSet) -> GradientPart:
            of = dy.part if isinstance(dy, LogitsGradient) else Leaf(rows, dy.dtype, rows_of(dy))
            return Mapped(of, back, self.dtype, rows)

        return self.gradient(index, part)


def _source(x: DeferredLogits) -> ReturnedSource:
    source: Any = x.chain.source
    return source  # type: ignore[no-any-return]


def _keep(ctx: Any, x: DeferredLogits, index: Tensor | None = None) -> None:
    ctx.place = _Place(x)
    save(ctx, stored_exact(x.rows) if x.rows is not None else None, stored_exact(index) if index is not None else None)


class MapFunction(torch.autograd.Function):
    """A function of each row, deferred."""

    @staticmethod
    def forward(ctx: Any, x: DeferredLogits, step: RowStep, like: Tensor) -> Tensor:
        _keep(ctx, x)
        ctx.step = step
        return mapped(x, step, like)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        steps, rule, dtype = (*ctx.place.steps, ctx.step), MAPS[ctx.step.name], ctx.place.dtype

        def back(dy: Tensor, chunk: Chunk, rows: Where) -> Tensor:
            return rule(dy, chunk.value(steps, rows)).to(dtype)

        return ctx.place.mapped(dy, load(ctx)[0], back), None, None


class ProductFunction(torch.autograd.Function):
    """The product of two functions of the same rows, deferred."""

    @staticmethod
    def forward(ctx: Any, a: DeferredLogits, b: DeferredLogits) -> Tensor:
        _keep(ctx, a)
        ctx.other = b.pointwise
        other = b.chain
        like = torch.empty(a.shape, dtype=a.dtype, device="meta")
        return mapped(a, lambda values: values * other.get(), like, Times(b.pointwise))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        index = load(ctx)[0]

        def times(steps: Steps) -> Tensor:
            def back(dy: Tensor, chunk: Chunk, rows: Where) -> Tensor:
                return dy * chunk.value(steps, rows)

            made: Tensor = ctx.place.mapped(dy, index, back)
            return made

        needs = ctx.needs_input_grad
        return times(ctx.other) if needs[0] else None, times(ctx.place.steps) if needs[1] else None


class ReduceFunction(torch.autograd.Function):
    """A function of each row that gives one number, or the numbers at `index` [..., n]."""

    @staticmethod
    def forward(ctx: Any, x: DeferredLogits, step: RowStep, index: Tensor | None) -> Tensor:
        _keep(ctx, x, index)
        ctx.step = step
        rows = RowSet(x.rows.flatten() if x.rows is not None else torch.arange(ctx.place.count))
        read, made = _source(x).read(), []
        if index is None and _source(x).values is not None:
            # the order of additions in a sum may depend on the number of rows
            whole = Chunk(read).value(x.pointwise, rows.part(slice(0, ctx.place.count)))
            return step(whole.view(x.shape))  # type: ignore[no-any-return]
        flat = index.flatten(0, -2) if index is not None else None
        for part in matrix_slices(ctx.place.count, x.size(-1)):
            y = Chunk(read).value(x.pointwise, rows.part(part))
            made.append(step(y) if flat is None else step(y, flat[part]))
            del y  # before the next ones are made
        return no_view(torch.cat(made).view(x.shape[:-1] if index is None else index.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        place, step = ctx.place, ctx.step
        numbers, index = load(ctx)
        flat_index = index.flatten(0, -2) if index is not None else None
        flat = dy.reshape(-1, 1 if index is None else index.size(-1))

        def gradient(chunk: Chunk, rows: Where, own: Where) -> Tensor:
            part = rows_at(flat, own)
            if step.name in LINEAR_REDUCTIONS:  # the logits themselves are not needed
                wanted = rows_at(flat_index, own) if flat_index is not None else None
                return LINEAR_REDUCTIONS[step.name](part, place.shape[-1], wanted).to(place.dtype)
            # logsumexp is the only other function that has a gradient
            x = chunk.value(place.steps, rows)
            y = step(x)[:, None]
            dx: Tensor = part * (x.to(y.dtype) - y).exp_()
            return dx.to(place.dtype)

        return place.gradient(numbers, lambda rows: Leaf(rows, place.dtype, gradient)), None, None


def map_rows(x: DeferredLogits, name: str, function: Callable[[Tensor], Tensor]) -> Tensor:
    """``function(x)`` of x [..., V], deferred; `name` is its row of `MAPS`."""
    step = RowStep(name, function, x)
    # under autocast the dtype may be another one; a small call of the function tells
    dtype = step(torch.zeros((1, 2), dtype=x.dtype, device=x.device)).dtype
    like = torch.empty(x.shape, dtype=dtype, device="meta")
    return applied(MapFunction, x, step, like)


def multiply_rows(a: DeferredLogits, b: DeferredLogits) -> Tensor:
    """a * b of two functions [..., V] of the same rows, deferred."""
    return applied(ProductFunction, a, b)


def reduce_rows(x: DeferredLogits, name: str, function: Callable[..., Tensor], index: Tensor | None = None) -> Tensor:
    """``function(x)`` [...] of x [..., V], or ``function(x, index)`` [..., n]; `name` is its row of a table, if any."""
    return applied(ReduceFunction, x, RowStep(name, function, x), index)
