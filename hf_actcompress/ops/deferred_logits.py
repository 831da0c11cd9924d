"""`DeferredLogits`: a tensor whose values are computed when something asks for them.

Row selections, casts and scales of it stay deferred. Every other op runs on the values, unless the source of the logits
has a function for it. Autograd sees an ordinary tensor throughout, so gradients are right whichever ops a model uses.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..compiling import is_compiling
from ..private_apis import without_torch_function
from ..records import applied
from .deferred_values import IN_PLACE, DeferredOp, Values
from .first_order import once_differentiable

aten = torch.ops.aten

# ops that select rows or change their shape; `_child` checks by its size that the last dimension stays
ROW_OPS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
}
# ops of these whose result has its own memory
_COPIES = {aten.clone.default, aten._unsafe_view.default}
# elementwise functions of the logits alone: casts, scales, softcaps
POINTWISE_OPS = {aten._to_copy.default, *IN_PLACE}
# the same functions in place
_IN_PLACE_OPS = {
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.mul_.Scalar: aten.mul.Scalar,
    aten.div_.Tensor: aten.div.Tensor,
    aten.div_.Scalar: aten.div.Scalar,
}
# several row selections at once
_SPLITTING_OPS = {aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default}

# functions that use the memory itself; True: the memory can then be written without autograd's notice
MEMORY: dict[Any, bool] = {
    Tensor.numpy: True,
    Tensor.__array__: True,
    Tensor.__dlpack__: True,
    Tensor.data_ptr: True,
    Tensor.share_memory_: True,
    Tensor.data.__get__: True,  # type: ignore[attr-defined]
    Tensor.untyped_storage: False,
    Tensor.tolist: False,
    Tensor.__format__: False,
    Tensor.__reduce_ex__: False,
    Tensor.__deepcopy__: False,
}
# functions that read no values
_READS = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf", "output_nr")
    ),
    *(Tensor.size, Tensor.dim, Tensor.stride, Tensor.numel, Tensor.is_floating_point),
}


class DeferredLogits(Tensor):
    """Logits ``[..., V]`` that are computed when something asks for their values, once."""

    # a codec must not ask for the values just to store what a node saves
    deferred = True
    chain: Values
    # [..., 1]: for each row of this tensor, the number of its row in the source; None: all rows, in order
    rows: Tensor | None
    # the function that is applied to each row of the source
    pointwise: tuple[Callable[[Tensor], Tensor], ...]

    @staticmethod
    def __new__(cls, chain: Values, like: Tensor) -> DeferredLogits:
        x: DeferredLogits = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=chain.source.device
        )
        x.chain, x.rows, x.pointwise = chain, None, ()
        chain.owner = weakref.ref(x)
        return x

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        if self.chain.root().made:
            return repr(plain(self))
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_compiling():
            return _on_values(func, args, kwargs or {})
        if func in _READS:
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        return _run(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        x = args[0] if args else None
        if isinstance(x, DeferredLogits) and not x.chain.written():
            deferred = _deferred(x, func, args[1:], kwargs)
            if deferred is not None:
                return deferred
        if func._schema.is_mutable or any(value.alias_info is not None for value in func._schema.returns):
            for used in _deferred_in((args, kwargs)):
                used.chain.source.lend()
        args_of, kwargs_of = tree_map_only(DeferredLogits, lambda deferred: deferred.chain.get(), (args, kwargs))
        result = func(*args_of, **kwargs_of)
        # an op in place returns the tensor that it was given
        return x if isinstance(x, DeferredLogits) and func._schema.is_mutable and result is x.chain.get() else result


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="a compiled function was given logits of a model that is not compiled, which are computed between its graphs"
)
def _on_values(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A function of torch on the values of deferred logits."""
    args, kwargs = tree_map_only(DeferredLogits, plain, (args, kwargs))
    return func(*args, **kwargs)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A function of torch on deferred logits."""
    if func in MEMORY:
        return _on_memory(func, args, kwargs)
    x = args[0] if args else None
    if not isinstance(x, DeferredLogits):
        x = next((a for a in (*args, *kwargs.values()) if isinstance(a, DeferredLogits)), None)
    better = x.chain.source.function(func) if x is not None else None
    if better is not None:
        result = better(*args, **kwargs)
        if result is not NotImplemented:
            return result
    with without_torch_function():
        return func(*args, **kwargs)


def _deferred_in(value: Any) -> Iterable[DeferredLogits]:
    return [x for x in tree_leaves(value) if isinstance(x, DeferredLogits)]


def _on_memory(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function of the memory on the memory of the values."""
    if func is Tensor.untyped_storage and not args[0].chain.root().made:
        # code that compares memory addresses finds no shared memory
        with without_torch_function():
            return func(*args)
    for x in _deferred_in((args, kwargs)):
        if MEMORY[func]:
            x.chain.source.exposed = True
            x.chain.source.lend()
    args, kwargs = tree_map_only(DeferredLogits, plain, (args, kwargs))
    return func(*args, **kwargs)


def _deferred(x: DeferredLogits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an op below autograd on x, still deferred; None if the op needs the values of x."""
    if func in _IN_PLACE_OPS:
        return _scaled_in_place(x, DeferredOp(_IN_PLACE_OPS[func], args, kwargs))
    if func in _SPLITTING_OPS:
        return _parts(x, func, args, kwargs)
    return _child(x, DeferredOp(func, args, kwargs))


def _child(x: DeferredLogits, step: DeferredOp) -> DeferredLogits | None:
    """x after the step, if the result is rows of logits or a function of each logit; else None."""
    pointwise = step.func in POINTWISE_OPS
    if pointwise:
        if not keeps_device(step, x) or any(isinstance(a, Tensor) for a in step.args):
            return None
    elif step.func not in ROW_OPS or x.size(-1) < 2:
        return None
    with without_torch_function():
        like = step(empty_like(x))
        if like.dim() == 0 or like.size(-1) != x.size(-1):
            return None
    return mapped(x, step, like) if pointwise else _selected(x, step, like, step.func not in _COPIES)


def mapped(
    x: DeferredLogits,
    step: Callable[[Tensor], Tensor],
    like: Tensor,
    of_rows: Callable[[Tensor], Tensor] | None = None,
) -> DeferredLogits:
    """The deferred `step` of each row of x, shaped like `like`. `of_rows` is the step for some rows, if it differs."""
    child = _derived(x, step, like)
    child.rows, child.pointwise = x.rows, (*x.pointwise, of_rows or step)
    return child


def _derived(x: DeferredLogits, step: Callable[[Tensor], Tensor], like: Tensor) -> DeferredLogits:
    child = DeferredLogits(Values(x.chain.source, x.chain, step), like)
    if x.chain.source.lent:  # computed now, because the values may change later
        child.chain.get()
    return child


def _selected(x: DeferredLogits, step: Callable[[Tensor], Tensor], like: Tensor, view: bool) -> DeferredLogits:
    """Some rows of x, in the shape of `like`."""
    child = _derived(x, step, like)
    # autograd counts the writes on a tensor and on its views together
    child.chain.seen = x._version if view else 0
    child.rows, child.pointwise = x.rows, x.pointwise
    if like.numel() != x.numel():
        child.rows = step(_rows(x))
    elif x.rows is not None:
        child.rows = x.rows.reshape(*like.shape[:-1], 1)
    return child


def _parts(x: DeferredLogits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The parts that x is split into along a dimension before the last; None for the last."""
    wholes = func(empty_like(x), *args, **kwargs)
    if x.size(-1) < 2 or any(part.dim() == 0 or part.size(-1) != x.size(-1) for part in wholes):
        return None

    def taken(position: int) -> DeferredOp:
        return DeferredOp(lambda whole: func(whole, *args, **kwargs)[position])

    return [_selected(x, taken(position), like, True) for position, like in enumerate(wholes)]


def _scaled_in_place(x: DeferredLogits, step: DeferredOp) -> DeferredLogits | None:
    """x after `x *= scalar`, deferred as before, if nobody else can see it change."""
    before = x.chain
    if before.source.lent:
        return None
    others = [chain for chain in before.source.chains if chain is not before and chain.owner() is not None]
    if others or x._is_view() or any(isinstance(a, Tensor) for a in step.args):
        return None
    x.chain = Values(before.source, before, step)
    x.chain.owner, x.chain.seen = before.owner, before.seen + 1
    before.owner = lambda: None
    x.pointwise = (*x.pointwise, step)
    return x


def empty_like(x: Tensor) -> Tensor:
    """A tensor without data in x's layout."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def keeps_device(step: DeferredOp, x: Tensor) -> bool:
    """Drop the step's device, so that the step works on any tensor. False if that device is not x's own."""
    device = step.kwargs.get("device")
    step.kwargs = {name: value for name, value in step.kwargs.items() if name not in ("device", "pin_memory")}
    return device is None or torch.device(device) == x.device


def _rows(x: DeferredLogits) -> Tensor:
    if x.rows is not None:
        return x.rows
    rows = torch.arange(x.numel() // x.size(-1), device=x.chain.source.rows_device)
    return rows.view(*x.shape[:-1], 1)


class _ValuesFunction(torch.autograd.Function):
    """The plain tensor of deferred logits."""

    @staticmethod
    def forward(ctx: Any, x: DeferredLogits) -> Tensor:
        # the values themselves get no graph, because they may be asked for again
        return x.chain.get().detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def plain(x: Tensor) -> Tensor:
    """The values of deferred logits as an ordinary, differentiable tensor; any other tensor as it is."""
    if not isinstance(x, DeferredLogits):
        return x
    return applied(_ValuesFunction, x)
