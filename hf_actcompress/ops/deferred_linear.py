"""The output of a linear layer that is not computed before someone needs its values: `DeferredLogits`.

A cross entropy on it goes to `linear_cross_entropy`. Whatever else a model does with it computes the values and goes
on with plain tensors. Autograd sees an ordinary tensor throughout, so gradients are right whichever way the model goes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from ..dispatch import implementation
from ..records import raw, record_of, save
from .autocast import autocast_dtype
from .cast import cast_record
from .linear import LinearFunction
from .linear_cross_entropy import linear_cross_entropy

aten = torch.ops.aten

# which rows there are and in what shape; that the last dimension stays is checked by its size
_ROW_OPS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.unsqueeze.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
}
# elementwise functions of the logits alone: casts, scales, softcaps
_POINTWISE_OPS = {
    aten._to_copy.default,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.tanh.default,
}


class _Step:
    """One op on logits, with its arguments but for the logits."""

    __slots__ = ("args", "func", "kwargs")

    def __init__(self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs

    def __call__(self, x: Tensor) -> Tensor:
        return self.func(x, *self.args, **self.kwargs)


class _Head:
    """One call of the linear layer."""

    __slots__ = ("bias", "dtype", "hidden", "keep_logits", "weight")

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, keep_logits: bool) -> None:
        self.hidden, self.weight, self.bias, self.keep_logits = hidden, weight, bias, keep_logits
        self.dtype = autocast_dtype(hidden) or hidden.dtype

    def logits(self) -> Tensor:
        """The values, outside autograd."""
        hidden, weight = self.hidden.detach().to(self.dtype), self.weight.detach().to(self.dtype)
        bias = self.bias.detach().to(self.dtype) if self.bias is not None else None
        with torch.autocast(hidden.device.type, enabled=False):
            return implementation("linear_fwd", hidden)(hidden, weight, bias, False)  # type: ignore[no-any-return]


class _Values:
    """How the values of deferred logits come about: from the head, or by a step from those before. Made at most once.

    It holds none of the tensors that autograd sees: their graph may hold this, and the cycle would never end.
    """

    __slots__ = ("_made", "head", "owner", "parent", "step")

    def __init__(self, head: _Head, parent: _Values | None = None, step: _Step | None = None) -> None:
        self.head, self.parent, self.step = head, parent, step
        self.owner: Callable[[], Tensor | None] = lambda: None
        self._made: Tensor | None = None

    def get(self) -> Tensor:
        """The plain tensor without gradient, as the stock ops make it from the head's output."""
        if self._made is not None:
            return self._made
        with torch.no_grad():
            if self.parent is None or self.step is None:
                self._made = self.head.logits()
                return self._made
            values = self.step(self.parent.get())
        if self.owner() is not None:  # nobody else can ask again
            self._made = values
        return values

    @property
    def made(self) -> bool:
        return self._made is not None

    def root(self) -> _Values:
        return self if self.parent is None else self.parent.root()

    def written(self) -> bool:
        """Whether something has changed the values in place, here, in a view of them or further up."""
        # autograd counts the writes on what it sees, which is the deferred tensor and not its values
        owner = self.owner()
        return (owner is not None and owner._version > 0) or (self.parent is not None and self.parent.written())


class DeferredLogits(Tensor):
    """Logits ``[..., V]`` that are computed when something asks for their values, once."""

    chain: _Values
    # rows [..., 1]: which row of the head each of ours is; None where they are all there, in order
    rows: Tensor | None
    pointwise: tuple[_Step, ...]

    @staticmethod
    def __new__(cls, chain: _Values, like: Tensor) -> DeferredLogits:
        x: DeferredLogits = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=chain.head.hidden.device
        )
        x.chain, x.rows, x.pointwise = chain, None, ()
        chain.owner = weakref.ref(x)
        return x

    @property
    def head(self) -> _Head:
        return self.chain.head

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.cross_entropy:
            return _cross_entropy(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        x = args[0] if args else None
        if isinstance(x, DeferredLogits) and not x.chain.written():
            child = _child(x, _Step(func, args[1:], kwargs))
            if child is not None:
                return child
        args_of, kwargs_of = tree_map_only(DeferredLogits, lambda deferred: deferred.chain.get(), (args, kwargs))
        result = func(*args_of, **kwargs_of)
        # an op in place returns the tensor that it was given
        return x if isinstance(x, DeferredLogits) and func._schema.is_mutable and result is x.chain.get() else result


def _child(x: DeferredLogits, step: _Step) -> DeferredLogits | None:
    """x after the step if that leaves rows of logits, or one function of each logit; else None."""
    if step.func in _POINTWISE_OPS:
        if not _keeps_device(step, x) or any(isinstance(a, Tensor) for a in step.args):
            return None
    elif step.func not in _ROW_OPS or x.size(-1) < 2:
        return None
    like = step(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"))
    if like.dim() == 0 or like.size(-1) != x.size(-1):
        return None
    child = DeferredLogits(_Values(x.head, x.chain, step), like)
    child.rows, child.pointwise = x.rows, x.pointwise
    if step.func in _POINTWISE_OPS:
        child.pointwise = (*x.pointwise, step)
    elif like.numel() != x.numel():
        child.rows = step(_rows(x))
    elif x.rows is not None:
        child.rows = x.rows.reshape(*like.shape[:-1], 1)
    return child


def _keeps_device(step: _Step, x: Tensor) -> bool:
    """Drops a device that is x's own, so that the step works on any tensor; False for another device."""
    device = step.kwargs.get("device")
    step.kwargs = {name: value for name, value in step.kwargs.items() if name not in ("device", "pin_memory")}
    return device is None or torch.device(device) == x.device


def _rows(x: DeferredLogits) -> Tensor:
    if x.rows is not None:
        return x.rows
    return torch.arange(x.numel() // x.size(-1), device=x.device).view(*x.shape[:-1], 1)


def _cross_entropy(
    input: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy`: fused for class indices on [N, V], torch's own for the rest."""
    plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    indices = isinstance(target, Tensor) and target.dtype == torch.int64 and target.dim() == 1
    if not (isinstance(input, DeferredLogits) and plain and indices and torch.is_grad_enabled()):
        return _stock(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    if input.shape[:-1] != target.shape or input.chain.written() or target.device != input.device or not target.numel():
        return _stock(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    head = input.head
    return linear_cross_entropy(
        head.hidden,
        head.weight,
        target,
        head.bias,
        reduction=reduction,
        ignore_index=ignore_index,
        rows=input.rows.view(-1) if input.rows is not None else None,
        logits=input.chain.root().get().flatten(0, -2) if head.keep_logits else None,
        pointwise=input.pointwise,
        dtype=head.dtype,
    )


def _stock(input: Any, target: Any, *options: Any) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return F.cross_entropy(input, target, *options)


class DeferredLinearFunction(LinearFunction):
    """`LinearFunction` that does not compute its output."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, keep_logits: bool, *_: None
    ) -> Tensor:  # x [..., D], weight [V, D], bias [V]
        head = _Head(x, weight, bias, keep_logits)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        record = None
        if needs_weight:
            record = record_of(x) if x.dtype == head.dtype else cast_record(x, head.dtype)
        save(ctx, record, raw(weight) if needs_x else None)
        ctx.dtypes = (head.dtype, x.dtype, weight.dtype, bias.dtype if bias is not None else None)
        ctx.transposed = False
        shape = (*x.shape[:-1], weight.size(0))
        return DeferredLogits(_Values(head), torch.empty(shape, dtype=head.dtype, device="meta"))


class _ValuesFunction(torch.autograd.Function):
    """From deferred logits to the plain tensor."""

    @staticmethod
    def forward(ctx: Any, x: DeferredLogits) -> Tensor:
        return x.chain.get()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def deferred_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, keep_logits: bool = True) -> Tensor:
    """Linear layer whose output is computed when something needs its values.

    Args:
        x: ``[..., D]``, floating point.
        weight: ``[V, D]``.
        bias: ``[V]`` or None.
        keep_logits: Whether the values will be asked for in the end (`plain`): then a loss is computed from them,
            bit-equal to stock's. False: a loss makes them in chunks.

    Returns:
        DeferredLogits ``[..., V]``. Row selections and scalar functions of it stay deferred; `cross_entropy` of it is
        `linear_cross_entropy`; any other op runs on its values.

    Saves:
        As `linear`, and only while something that was made from the values is alive.

    Gradient:
        Exact.
    """
    y: Tensor = DeferredLinearFunction.apply(x, weight, bias, keep_logits, None, None)  # type: ignore[no-untyped-call]
    return y


def plain(x: Tensor) -> Tensor:
    """The values of deferred logits as an ordinary, differentiable tensor; any other tensor as it is."""
    if not isinstance(x, DeferredLogits):
        return x
    y: Tensor = _ValuesFunction.apply(x)  # type: ignore[no-untyped-call]
    return y
