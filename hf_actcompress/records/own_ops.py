"""Our own ops under the net: they decide themselves what to keep, so the net is off while they run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from torch import Tensor

from ..compiling import is_compiling
from ..private_apis import bare_apply, pop_saved_tensor_hooks, push_saved_tensor_hooks
from ._current import current
from .nodes import POINTWISE_NODES
from .saving import own_tensors

_Result_co = TypeVar("_Result_co", covariant=True)


class _Off:
    """The net is off while one of our ops runs, because the op decides what to keep. That saves time on the host.

    The net is on again before autograd saves, if a saved tensor was made by a node of stock code that keeps its inputs.
    """

    # no __init__, which would be a call for each of our ops
    hooks: tuple[Any, Any]
    on = False

    def needed(self, saved: Sequence[Tensor | None], outside: Sequence[int]) -> bool:
        if not self.on:
            for i in outside:
                x = saved[i]
                if x is None or x.grad_fn is None:
                    continue
                # most tensors are ruled out without a call: this runs for each of our ops
                base = x if x._base is None else x._base
                if type(base.grad_fn).__name__ in POINTWISE_NODES:
                    push_saved_tensor_hooks(*self.hooks)
                    self.on = True
                    break
        return self.on


class _Function(Protocol[_Result_co]):
    """A subclass of `torch.autograd.Function`, whose forward says what `apply` returns."""

    @classmethod
    def apply(cls, *args: Any) -> Any: ...

    @staticmethod
    def forward(*args: Any, **kwargs: Any) -> _Result_co: ...


def applied(function: _Function[_Result_co], *inputs: Any) -> _Result_co:
    """``function.apply(*inputs)`` of one of our ops. The net is off, unless outer hooks must get what is kept."""
    net = current.net
    if net is None or is_compiling() or not net.is_innermost():
        return function.apply(*inputs)  # type: ignore[no-any-return]
    off = _Off()
    off.hooks = net.hooks
    if net.outside is not None:
        off.on = True
    else:
        pop_saved_tensor_hooks()
    own_tensors.asked = off.needed
    try:
        # no torch.func transform is on, because there is a net
        return bare_apply(function, *inputs)  # type: ignore[no-any-return]
    finally:
        if off.on:
            own_tensors.forget()
        else:
            push_saved_tensor_hooks(*net.hooks)
            own_tensors.asked = None


@contextmanager
def as_stock_saves() -> Iterator[None]:
    """Inside, the net does not look at what stock ops save: little, and made by an op of ours."""
    net = current.net
    if net is None or is_compiling() or net.outside is not None or not net.is_innermost():
        yield
        return
    pop_saved_tensor_hooks()
    try:
        yield
    finally:
        push_saved_tensor_hooks(*net.hooks)


def is_recomputed(x: Tensor) -> bool:
    """Whether the net will make x again, if the op that runs saves it; so that saving x costs nothing."""
    net = current.net
    return net is not None and own_tensors.asked is not None and x.grad_fn is not None and net.makes(x)
