"""The net under all rules: what code without a rule saves is not kept where it can be computed again.

While the forward of a patched model runs, saved-tensor hooks look at every tensor that autograd saves. It is not kept

- if the registry has a derived record of it (the output of a norm that an unknown attention reads),
- if the autograd node that made it keeps what makes it again (the product of gate and up),
- if it is the mask of `torch.nn.functional.dropout`: that is kept as bits.

Under a lossy preset, what is left of large activations goes through a codec.

Hooks switch torch's own check for in-place writes off, so the net compares versions and raises torch's error itself.
Hooks that are on outside of the net (`save_on_cpu`, a report) get what the net keeps. Inside of a checkpointed region
the hooks of the checkpoint are the innermost, and the net sees nothing.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from ..codecs import IDENTITY, Codec, on_feature_maps
from ..private_apis import (
    innermost_saved_tensor_hooks,
    next_sequence_number,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saved_tensor_hooks_allowed,
)
from ..reference.bits import pack_mask
from ._current import Netting, current
from .activations import is_activation, is_feature_map
from .held import Held, Kept, Made, Mask, counted, value_of
from .nodes import Pointwise, computation, copied_attention, pointwise, proved, tokens_first
from .outside import hooks_outside, stands_before
from .padding import checkpointed, is_dropped
from .record import Derived, Recipe, Record, is_lossless
from .registry import known_record, whole_record_of
from .saving import Leaves, Slot, own_tensors, slot_of
from .views import View, dense

# what `torch.autograd.Function.apply` takes and gives
_Function = type[torch.autograd.Function]
# elements; smaller tensors are kept
_SMALL = 256
_DROPOUT = torch.nn.functional.dropout.__code__


class Net:
    """The hooks of one forward. Autograd holds them as long as the graph, so nothing here may hold a tensor."""

    def __init__(self, codec: Codec | None) -> None:
        self.codec = codec
        # those that were on before get what is kept
        self.outside = hooks_outside()
        stands_before(self, self.outside)
        self.hooks = self.pack, self.unpack
        # what each node saved, in order, by its number
        self._by_node: dict[int, list[weakref.ref[Held]]] = {}
        # the output of each node that saved its own output, by its number
        self._outputs: dict[int, weakref.ref[Held]] = {}
        # what is computed again, by the id of the tensor object, as long as that lives
        self._made: dict[int, tuple[weakref.ref[Tensor], int, weakref.ref[Held]]] = {}

    def pack(self, x: Tensor) -> Held:
        """What autograd is to hold in place of x [any shape], which it saves now."""
        own = own_tensors.take(x)
        held = None if own or current.call is None else current.call.pack(x)
        held = held or self._smaller(x, own) or self._kept(x)
        # a node takes its number, and then it saves
        number = next_sequence_number() - 1
        self._by_node.setdefault(number, []).append(weakref.ref(held))
        if x.grad_fn is not None and x.grad_fn._sequence_nr() == number:
            self._outputs[number] = weakref.ref(held)
        return counted(held)

    def unpack(self, held: Held) -> Tensor:
        """x again. Raises RuntimeError where torch does: somebody has written in place."""
        return value_of(held, self.outside)

    def is_innermost(self) -> bool:
        """Whether no other hooks have been installed since: those of a checkpointed region."""
        top = innermost_saved_tensor_hooks()
        return top is not None and top[0] is self.hooks[0]

    def close(self) -> None:
        """Forget what only a forward in progress needs. The hooks are methods: they would hold this for ever."""
        del self.hooks
        self._by_node.clear()
        self._outputs.clear()
        self._made.clear()

    def held_for(self, x: Tensor) -> Held:
        """What is to be held in place of x, which was saved a while ago, and has not been written on since."""
        return self._smaller(x) or self._kept(x)

    def _smaller(self, x: Tensor, own: bool = False) -> Held | None:
        node = x.grad_fn
        if x.numel() < _SMALL or (node is None and isinstance(x, Parameter)):
            return None
        held = self._computed(x) if node is not None else None
        return held if held is not None or own else self._recorded(x) or self._mask(x) or self._packed(x)

    def _kept(self, *tensors: Tensor, slot: Slot | None = None) -> Kept:
        # without their graph, which may hold this. A leaf is held itself: ZeRO-3 and FSDP2 change a parameter's data
        parts = tuple(x if x.grad_fn is None else x.detach() for x in tensors)
        outside = self.outside
        if outside is None:
            return Kept(parts, tuple(x._version for x in parts), slot)
        return Kept(tuple(outside[0](x) for x in parts), None, slot)

    def _recorded(self, x: Tensor) -> Held | None:
        """Made again through the registry, which knows what our ops made."""
        record = known_record(x)
        if record is None or is_dropped(record):
            # padding rows are dropped only where somebody looks at the gradient there
            return None
        lossless = is_lossless(record)
        if (lossless and not isinstance(record, Derived)) or not (lossless or self.codec):
            return None
        return self._by_record(record)

    def _packed(self, x: Tensor) -> Held | None:
        """Packed by the codec, if x is an activation. Other tensors that no rule knows are kept as they are."""
        if self.codec is None or not is_activation(x):
            return None
        # a ReLU, or a leaky one in place, saves its result and reads there where the gradient goes through
        relu = type(x.grad_fn).__name__ in ("ReluBackward0", "LeakyReluBackward1")
        codec = on_feature_maps(self.codec) if is_feature_map(x) else self.codec
        return self._by_record(whole_record_of(x, codec.keeping_sign() if relu else codec))

    def _by_record(self, record: Record) -> Kept:
        leaves = Leaves()
        slot = slot_of(record, leaves)
        return self._kept(*leaves.tensors, slot=slot)

    def _computed(self, x: Tensor) -> Made | None:
        """Made again by the autograd node that made x, or the tensor of which x is a view."""
        base = x._base if x._base is not None else x
        if base.numel() != x.numel():
            return None
        held = self._known(base) or self._by_its_node(base)
        if held is None or (x.shape == base.shape and x.stride() == base.stride()):
            return held
        if not dense(base.shape, base.stride()) or base.storage_offset() != x.storage_offset():
            return None
        return Made(Recipe(View(x.shape, x.stride())), (counted(held),))

    def _known(self, x: Tensor) -> Made | None:
        known = self._made.get(id(x))
        if known is None or known[0]() is not x or known[1] != x._version:
            return None
        held = known[2]()
        return held if isinstance(held, Made) else None

    def _by_its_node(self, x: Tensor) -> Made | None:
        if x._version:
            # somebody may have written on it without a gradient, which its node does not show
            return None
        found = self._copied(x) or self._pointwise(x)
        if found is None:
            return None
        compute, sources = found
        held = Made(Recipe(compute), tuple(counted(source) for source in sources))
        key = id(x)
        self._made[key] = weakref.ref(x, lambda _: self._made.pop(key, None)), x._version, weakref.ref(held)
        return held

    def _pointwise(self, x: Tensor) -> tuple[Callable[..., Tensor], list[Held]] | None:
        node: Any = x.grad_fn
        row = pointwise(node)
        sources = None if row is None else self._sources(row, node)
        if row is None or sources is None or not proved(node, row, x.dtype, x.device):
            return None
        return computation(row, node), sources

    def _copied(self, x: Tensor) -> tuple[Callable[..., Tensor], list[Held]] | None:
        """Made again from the output [B, H, S, D] of torch's attention, if x is its copy as [B, S, H, D]."""
        attention = copied_attention(x)
        reference = None if attention is None else self._outputs.get(attention._sequence_nr())
        held = None if reference is None else reference()
        return None if held is None else (tokens_first, [held])

    def _sources(self, row: Pointwise, node: Any) -> list[Held] | None:
        """What a node holds, if it holds all of its inputs; else None."""
        saved = [reference() for reference in self._by_node.get(node._sequence_nr(), ())]
        found = [held for held in saved if held is not None]
        if len(found) == 1 and isinstance(found[0], Mask) and found[0].dropped is not None:
            found.append(found[0].dropped)
        return found if len(found) == row.tensors else None

    def _mask(self, x: Tensor) -> Mask | None:
        """Kept as the bits that `torch.nn.functional.dropout` has drawn, if its node is what saves x now."""
        frame = sys._getframe(3)
        if frame.f_code is not _DROPOUT or x.grad_fn is not None or not x.is_contiguous():
            return None
        called = frame.f_locals
        given, p = called["input"], called["p"]
        if x.shape != given.shape or p >= 1:
            return None
        dropped = self._computed(given) or self._recorded(given)
        return Mask(self._kept(pack_mask(x.bool())), x.shape, x.dtype, 1 - p, dropped)


@contextmanager
def netted(codec: Codec) -> Iterator[None]:
    """While it is on, this thread's autograd does not keep what can be computed again. For one forward, in a frame.

    Args:
        codec: How the activations are stored that stock code saves and nobody can compute again.
    """
    if not torch.is_grad_enabled() or checkpointed() or not saved_tensor_hooks_allowed():
        yield
        return
    net, before = Net(None if codec == IDENTITY else codec), current.net
    try:
        with saved_tensors_hooks(*net.hooks):
            current.net = net
            yield
    finally:
        current.net = before
        net.close()


class _Off:
    """The net is off for one of our ops, which knows itself what to keep: that saves the host's time.

    It is on again before autograd saves, if what is saved has been made by a node of stock code that keeps its inputs.
    """

    __slots__ = ("hooks", "on")

    def __init__(self, net: Netting) -> None:
        self.hooks, self.on = net.hooks, False

    def __enter__(self) -> None:
        pop_saved_tensor_hooks()
        own_tensors.asked = self._needed

    def __exit__(self, *exception: object) -> None:
        if not self.on:
            push_saved_tensor_hooks(self.hooks)

    def _needed(self, saved: Sequence[Tensor]) -> bool:
        if not self.on and any(map(_is_made, saved)):
            push_saved_tensor_hooks(self.hooks)
            self.on = True
        return self.on


def applied(function: _Function, *inputs: Any) -> Any:
    """``function.apply(*inputs)`` of one of our ops. Without the net, where no hooks outside must get what is kept."""
    net = None if torch.compiler.is_compiling() else current.net
    if net is None or not net.is_innermost():
        return function.apply(*inputs)  # type: ignore[no-untyped-call]
    try:
        if net.outside is not None:
            own_tensors.asked = _always
            return function.apply(*inputs)  # type: ignore[no-untyped-call]
        with _Off(net):
            return function.apply(*inputs)  # type: ignore[no-untyped-call]
    finally:
        own_tensors.forget()


def unnetted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The function's result without the net, so that autograd keeps all: for what the net could save nothing of."""
    net = None if torch.compiler.is_compiling() else current.net
    if net is None or net.outside is not None or not net.is_innermost():
        return function(*args, **kwargs)
    pop_saved_tensor_hooks()
    current.net = None
    try:
        return function(*args, **kwargs)
    finally:
        push_saved_tensor_hooks(net.hooks)
        current.net = net


def _always(saved: Sequence[Tensor]) -> bool:
    return True


def _is_made(x: Tensor) -> bool:
    """Whether a node that `nodes` knows made x, or the tensor of which x is a view."""
    if x.grad_fn is None:
        return False
    base = x._base if x._base is not None else x
    return pointwise(base.grad_fn) is not None or copied_attention(base) is not None
