"""Our own ops under the net: they decide themselves what to keep, so the net is off while they run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import Tensor

from ..compiling import is_compiling
from ..private_apis import bare_apply, pop_saved_tensor_hooks, push_saved_tensor_hooks
from ._current import Netting, current
from .activations import CONVOLUTIONS, is_feature_map
from .held import Made
from .joined import is_asked, is_exact, slotted
from .joining import COPIES, JOINING_NODES
from .nodes import POINTWISE_NODES
from .padding import keeps_nothing_new
from .parts import is_part
from .record import Record
from .saving import Leaves, own_tensors, slot_of

_Result_co = TypeVar("_Result_co", covariant=True)
# the nodes that may have made a tensor about which the net is asked
_KINDS = COPIES | CONVOLUTIONS | JOINING_NODES.keys() | POINTWISE_NODES.keys()


class _Off:
    """The net is off while one of our ops runs, because the op decides what to keep. That saves time on the host.

    The net is on again before autograd saves, if a saved tensor was made by a node of stock code that keeps its inputs,
    or is a part of a larger tensor.
    """

    # no __init__, which would be a call for each of our ops
    hooks: tuple[Any, Any]
    on = False
    # what the op saves
    saved: Sequence[Tensor | None] = ()

    def needed(self, saved: Sequence[Tensor | None], outside: Sequence[int]) -> bool:
        self.saved = saved
        if not self.on:
            for i in outside:
                x = saved[i]
                if x is None or x.grad_fn is None:
                    continue
                # most tensors are ruled out without a call: this runs for each of our ops
                base = x if x._base is None else x._base
                made = type(base.grad_fn).__name__ in _KINDS and _is_made(base)
                if made or (x.nbytes < base.nbytes and is_part(x)):
                    push_saved_tensor_hooks(*self.hooks)
                    self.on = True
                    break
        return self.on

    def kept(self, net: Netting) -> Sequence[Tensor | None]:
        """The saved tensors that stay as they are: the net makes others again, or copies them."""
        if current.call is not None:
            # what a call saves that runs again is gone when it ends
            return ()
        if not self.on:
            return self.saved
        return [x for x in self.saved if x is not None and not is_part(x) and not net.is_made(x)]

    def held(self, net: Netting, node: Any, record: Record) -> Made | None:
        """What is held for an output with that record, if the net has looked at all that the op saves."""
        if not self.on or current.call is not None or not keeps_nothing_new(record):
            return None
        saved, held = [x for x in self.saved if x is not None], net.saved_by(node)
        if len(held) != len(saved):
            return None
        leaves = Leaves()
        slot, by_id = slot_of(record, leaves), dict(zip(map(id, saved), held, strict=True))
        sources = [by_id.get(id(x)) for x in leaves.tensors]
        found = [source for source in sources if source is not None and is_exact(source)]
        return Made(slotted(slot), found) if len(found) == len(sources) else None


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
    before, current.declared = current.declared, []
    try:
        # no torch.func transform is on, because there is a net
        out: _Result_co = bare_apply(function, *inputs)
        for y, entry in current.declared:
            net.declared.note(y, entry, off.kept(net), partial(off.held, net, y.grad_fn))
        return out
    finally:
        current.declared = before
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
    if net is None or own_tensors.asked is None or x.grad_fn is None:
        return False
    return _is_made(x) and net.makes(x)


def _is_made(x: Tensor) -> bool:
    """Whether a node of the tables, or a convolution, made x or the tensor of which x is a view.

    The net then notes what is held for x, also where it is x itself: what is made of x need not be kept.
    """
    base = x._base if x._base is not None else x
    return is_asked(base) or is_feature_map(base)
