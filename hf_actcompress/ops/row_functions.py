"""Functions of the rows of logits that keep nothing of vocabulary size.

Some map each row to a row and stay deferred (log_softmax, softmax, exp, products); the others map each row to one or a
few numbers (gather, logsumexp, sum, mean) and are computed. What they keep is what is small: indices and row numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..records import load, raw, save
from ..reference.linear_rows import row_chunks
from .autocast import SameAutocast
from .deferred_logits import DeferredLogits, mapped, plain
from .first_order import once_differentiable
from .gradient_parts import Chunk, Leaf, Mapped, Part, Steps, Times, rows_of
from .linear import no_view
from .logits_gradient import LogitsGradient
from .row_set import RowSet, Where, taken

if TYPE_CHECKING:
    from .returned_logits import HeadOrigin, ReturnedSource

_Reduce = Callable[..., Tensor]


class _Place:
    """Where a function took its logits from: all that its backward has to know of them. It holds no tensor."""

    __slots__ = ("count", "dtype", "origin", "shape", "steps")

    def __init__(self, x: DeferredLogits) -> None:
        self.origin: HeadOrigin = _source(x).origin
        self.shape, self.dtype, self.steps = x.shape, x.dtype, x.pointwise
        self.count = x.numel() // x.size(-1)

    def gradient(self, index: Tensor | None, make: Callable[[RowSet], Part]) -> LogitsGradient:
        """What `make` makes of the rows, as the gradient of those logits."""
        rows = torch.arange(self.count) if index is None else index.flatten()
        like = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return LogitsGradient(make(RowSet(rows)), self.origin, like, rows)


def _source(x: DeferredLogits) -> ReturnedSource:
    source: Any = x.chain.source
    return source  # type: ignore[no-any-return]


def _keep(ctx: Any, x: DeferredLogits, index: Tensor | None = None) -> None:
    ctx.place = _Place(x)
    save(ctx, raw(x.rows) if x.rows is not None else None, raw(index) if index is not None else None)


def _as_part(dy: Tensor, rows: RowSet) -> Part:
    return dy.part if isinstance(dy, LogitsGradient) else Leaf(rows, dy.dtype, rows_of(dy))


class MapFunction(torch.autograd.Function):
    """A function of each row, deferred."""

    @staticmethod
    def forward(ctx: Any, x: DeferredLogits, step: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
        _keep(ctx, x)
        ctx.step = step
        return mapped(x, step, like)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        place, step = ctx.place, ctx.step

        def back(dy: Tensor, chunk: Chunk, rows: Where) -> Tensor:
            with torch.enable_grad():
                x = chunk.value(place.steps, rows).detach().requires_grad_()
                return torch.autograd.grad(step(x), x, dy)[0]

        index = load(ctx)[0]
        return place.gradient(index, lambda rows: Mapped(_as_part(dy, rows), back, place.dtype, rows)), None, None


class ProductFunction(torch.autograd.Function):
    """The product of two functions of the same rows, deferred."""

    @staticmethod
    def forward(ctx: Any, a: DeferredLogits, b: DeferredLogits) -> Tensor:
        _keep(ctx, a)
        ctx.other = b.pointwise
        b_chain = b.chain
        like = torch.empty(a.shape, dtype=a.dtype, device="meta")
        return mapped(a, lambda values: values * b_chain.get(), like, Times(b.pointwise))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        place = ctx.place
        index = load(ctx)[0]

        def times(steps: Steps) -> LogitsGradient:
            def back(dy: Tensor, chunk: Chunk, rows: Where) -> Tensor:
                return dy * chunk.value(steps, rows)

            made: LogitsGradient = place.gradient(
                index, lambda rows: Mapped(_as_part(dy, rows), back, place.dtype, rows)
            )
            return made

        needs = ctx.needs_input_grad
        return times(ctx.other) if needs[0] else None, times(place.steps) if needs[1] else None


class ReduceFunction(torch.autograd.Function):
    """A function of each row to one number, or to some: ``reduce(x, index)``."""

    @staticmethod
    def forward(ctx: Any, x: DeferredLogits, reduce: _Reduce, index: Tensor | None) -> Tensor:
        _keep(ctx, x, index)
        ctx.reduce = reduce
        rows = RowSet(x.rows.flatten() if x.rows is not None else torch.arange(ctx.place.count))
        read, made = _source(x).read(), []
        if index is None and _source(x).values is not None:
            # the order in which a sum adds up may depend on how many rows there are
            whole = Chunk(read).value(x.pointwise, rows.part(slice(0, ctx.place.count)))
            return reduce(whole.view(x.shape))
        flat = index.flatten(0, -2) if index is not None else None
        for part in row_chunks(ctx.place.count, x.size(-1)):
            y = Chunk(read).value(x.pointwise, rows.part(part))
            made.append(reduce(y) if flat is None else reduce(y, flat[part]))
        return no_view(torch.cat(made).view(x.shape[:-1] if index is None else index.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        place, reduce = ctx.place, ctx.reduce
        numbers, index = load(ctx)
        flat = index.flatten(0, -2) if index is not None else None
        flat_dy = dy.reshape(-1, index.size(-1)) if index is not None else dy.reshape(-1)

        def gradient(chunk: Chunk, rows: Where, own: Where) -> Tensor:
            part = taken(flat_dy, own)
            if flat is not None:  # the gradient of `gather`, which needs no values
                wanted = taken(flat, own)
                zeros = part.new_zeros((wanted.size(0), place.shape[-1]), dtype=place.dtype)
                return zeros.scatter_add_(-1, wanted, part.to(place.dtype))
            with torch.enable_grad():
                x = chunk.value(place.steps, rows).detach().requires_grad_()
                return torch.autograd.grad(reduce(x), x, part)[0]

        return place.gradient(numbers, lambda rows: Leaf(rows, place.dtype, gradient)), None, None


def _fits(x: Any, dim: Any = -1) -> bool:
    """Whether x are logits whose rows are as the head made them, and `dim` is that of the vocabulary."""
    if not isinstance(x, DeferredLogits) or torch._C._are_functorch_transforms_active():
        return False
    return x.dim() > 1 and x.numel() > 0 and dim in (-1, x.dim() - 1) and not x.chain.written()


def _mapped(x: DeferredLogits, function: Callable[[Tensor], Tensor]) -> Tensor:
    step = SameAutocast(function, x)
    # under autocast the dtype may be another: asked of torch
    dtype = step(torch.zeros((1, 2), dtype=x.dtype, device=x.device)).dtype
    like = torch.empty(x.shape, dtype=dtype, device="meta")
    y: Tensor = MapFunction.apply(x, step, like)  # type: ignore[no-untyped-call]
    return y


def _reduced(x: DeferredLogits, function: _Reduce, index: Tensor | None = None) -> Tensor:
    y: Tensor = ReduceFunction.apply(x, SameAutocast(function, x), index)  # type: ignore[no-untyped-call]
    return y


def _softmax_like(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def of(input: Any, dim: Any = None, *rest: Any, dtype: torch.dtype | None = None, **options: Any) -> Any:
        # the third argument of torch.nn.functional's is a stack level
        dtype = next((a for a in rest if isinstance(a, torch.dtype)), dtype)
        if not _fits(input, dim) or options.keys() - {"_stacklevel"}:
            return NotImplemented
        return _mapped(input, partial(function, dim=-1, dtype=dtype))

    return of


def _exp(input: Any, **options: Any) -> Any:
    return _mapped(input, torch.exp) if _fits(input) and not options else NotImplemented


def _product(input: Any, other: Any, **options: Any) -> Any:
    if options or not (_fits(input) and _fits(other)) or input.chain.source is not other.chain.source:
        return NotImplemented
    if input.shape != other.shape or input.dtype != other.dtype:
        return NotImplemented
    same = input.rows is other.rows or (
        input.rows is not None and other.rows is not None and torch.equal(input.rows, other.rows)
    )
    return ProductFunction.apply(input, other) if same else NotImplemented  # type: ignore[no-untyped-call]


def _gather(input: Any, dim: int, index: Tensor, **options: Any) -> Any:
    if not _fits(input, dim) or any(options.values()) or not isinstance(index, Tensor):
        return NotImplemented
    plain_index = type(index) is Tensor and index.dtype == torch.int64 and index.device == input.device
    if not plain_index or index.shape[:-1] != input.shape[:-1] or index.dim() != input.dim() or not index.numel():
        return NotImplemented
    return _reduced(input, _gathered, index)


def _gathered(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(-1, index)


def _reduction(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def of(input: Any, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
        if isinstance(dim, (tuple, list)) and len(dim) == 1:
            dim = dim[0]
        if not _fits(input, dim) or options.keys() - {"dtype"}:
            return NotImplemented
        y = _reduced(input, partial(function, dim=-1, **options))
        return y.unsqueeze(-1) if keepdim else y

    return of


def _nll_loss(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """`torch.nn.functional.nll_loss` of class indices [N] for log-probabilities [N, V]."""
    if not (_fits(input) and _class_indices(input, target)) or (weight, size_average, reduce) != (None, None, None):
        return NotImplemented
    counts = target != ignore_index
    if not target.is_cuda:  # a GPU stops at such an index by itself
        _check_target(target[counts], input.size(-1))
    picked = _gather(input, -1, torch.where(counts, target, 0)[:, None])
    # torch's own sum, in the order of the whole [N, V]
    zero = torch.where(counts, 0, ignore_index)
    return F.nll_loss(picked, zero, ignore_index=ignore_index, reduction=reduction)


def _class_indices(input: Tensor, target: Any) -> bool:
    plain_target = type(target) is Tensor and target.dtype == torch.int64 and target.device == input.device
    return plain_target and input.dim() == 2 and target.shape == input.shape[:-1]


def _check_target(target: Tensor, classes: int) -> None:
    outside = (target < 0) | (target >= classes)
    if outside.any():
        raise IndexError(f"Target {int(target[outside][0])} is out of bounds.")


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`torch.nn.functional.cross_entropy` of class indices [N] for logits [N, V], as torch composes it."""
    if not (_fits(input) and _class_indices(input, target)) or (weight, size_average, reduce) != (None, None, None):
        return NotImplemented
    log_probabilities = torch.log_softmax(input, 1)
    loss: Tensor = F.nll_loss(log_probabilities, target, ignore_index=ignore_index, reduction=reduction)
    if label_smoothing == 0.0:
        return loss
    ignored = target == ignore_index
    smooth = -log_probabilities.sum(1).masked_fill(ignored, 0)
    if reduction == "mean":
        smooth = smooth.sum() / (target.numel() - ignored.sum())
    elif reduction == "sum":
        smooth = smooth.sum()
    return (1 - label_smoothing) * loss + smooth * (label_smoothing / input.size(-1))


def _detached(input: Any) -> Any:
    """The values, in the same memory as in stock. Autograd's own `detach` is below this."""
    return plain(input).detach() if isinstance(input, DeferredLogits) else NotImplemented


def _hooked(register: Callable[..., Any]) -> Callable[..., Any]:
    def of(input: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        # a hook may keep the gradient until it cannot be computed any more
        return _as_stock(register, input, lambda dy: hook(_dense(dy)))

    return of


def _retain_grad(input: Tensor) -> Any:
    _as_stock(Tensor.register_hook, input, _dense)
    return _as_stock(Tensor.retain_grad, input)


def _as_stock(function: Callable[..., Any], *args: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args)


def _dense(dy: Tensor) -> Tensor:
    return dy.dense() if isinstance(dy, LogitsGradient) else dy


_log_softmax, _softmax = _softmax_like(torch.log_softmax), _softmax_like(torch.softmax)
_logsumexp, _sum, _mean = _reduction(torch.logsumexp), _reduction(torch.sum), _reduction(torch.mean)
_TABLE: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((F.log_softmax, torch.log_softmax, Tensor.log_softmax, torch.special.log_softmax), _log_softmax),
    **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax), _softmax),
    **dict.fromkeys((torch.exp, Tensor.exp), _exp),
    **dict.fromkeys((torch.mul, Tensor.mul, torch.multiply, Tensor.multiply, Tensor.__mul__), _product),
    **dict.fromkeys((torch.gather, Tensor.gather), _gather),
    **dict.fromkeys((torch.logsumexp, Tensor.logsumexp, torch.special.logsumexp), _logsumexp),
    **dict.fromkeys((torch.sum, Tensor.sum), _sum),
    **dict.fromkeys((torch.mean, Tensor.mean), _mean),
    F.nll_loss: _nll_loss,
    F.cross_entropy: _cross_entropy,
    Tensor.detach: _detached,
    Tensor.register_hook: _hooked(Tensor.register_hook),
    Tensor.retain_grad: _retain_grad,
}


def row_function(func: Any) -> Callable[..., Any] | None:
    """What runs instead of a function of torch on logits that left their model; NotImplemented if it cannot."""
    return _TABLE.get(func)
