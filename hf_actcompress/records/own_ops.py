"""Our own ops under the net: they decide themselves what to keep, so the net is off while they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from ..compiling import is_compiling
from ..private_apis import bare_apply, pop_saved_tensor_hooks, push_saved_tensor_hooks
from ._current import current

_Result_co = TypeVar("_Result_co", covariant=True)


class _Function(Protocol[_Result_co]):
    """A subclass of `torch.autograd.Function`, whose forward says what `apply` returns."""

    @classmethod
    def apply(cls, *args: Any) -> Any: ...

    @staticmethod
    def forward(*args: Any, **kwargs: Any) -> _Result_co: ...


def applied(function: _Function[_Result_co], *inputs: Any) -> _Result_co:
    """``function.apply(*inputs)`` of one of our ops. The net is off; hooks of others get what the op keeps."""
    net = current.net
    if net is None or is_compiling() or not net.is_innermost():
        return function.apply(*inputs)  # type: ignore[no-any-return]
    pop_saved_tensor_hooks()
    try:
        # no torch.func transform is on, because there is a net
        return bare_apply(function, *inputs)  # type: ignore[no-any-return]
    finally:
        push_saved_tensor_hooks(*net.hooks)


@contextmanager
def as_stock_saves() -> Iterator[None]:
    """Inside, the net does not look at what stock ops save: little, and made by an op of ours."""
    net = current.net
    if net is None or is_compiling() or not net.is_innermost():
        yield
        return
    pop_saved_tensor_hooks()
    try:
        yield
    finally:
        push_saved_tensor_hooks(*net.hooks)
