"""The net under all rules: what code without a rule saves is not kept where it can be computed again.

While the forward of a patched model runs, saved-tensor hooks look at every tensor that autograd saves. It is not kept

- if the registry has a derived record of it (the output of a norm that an unknown attention reads),
- if the autograd node that made it keeps what makes it again (the product of gate and up), or has taken it from a
  parameter (the weights of batched experts, one for each token),
- if it is the mask of `torch.nn.functional.dropout`: that is kept as bits.

What is a part of a larger tensor is kept as a copy where nobody holds the rest (`parts.py`), and the indices of a
max-pooling in as few bytes as the image needs.

Under a lossy preset, what is left of large activations goes through a codec.

Hooks switch torch's own check for in-place writes off, so the net compares versions and raises torch's error itself.
Hooks that are on outside of the net (`save_on_cpu`, a report) get what the net keeps. Inside of a checkpointed region
the hooks of the checkpoint are the innermost, and the net sees nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
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
    saved_tensor_hooks_allowed,
)
from ..reference.bits import pack_mask
from ._current import current
from .activations import is_activation, is_feature_map
from .functional import dropout_of_mask, narrow_indices, widened
from .held import Held, Kept, Made, Mask, counted, value_of
from .nodes import Pointwise, attention_in_order, computation, gathered_from, pointwise, proved, rows
from .outside import hooks_outside, stands_before
from .padding import checkpointed, is_dropped
from .parts import Parts
from .record import Derived, Recipe, Record, is_lossless
from .registry import known_record, whole_record_of
from .saving import Leaves, Slot, own_tensors, slot_of
from .views import View, dense

# elements; smaller tensors are kept
_SMALL = 256


class Net:
    """The hooks of one forward. Autograd holds them as long as the graph, so nothing here may hold a tensor."""

    def __init__(self, codec: Codec | None) -> None:
        self.codec = codec
        # those that were on before get what is kept
        self.outside = hooks_outside()
        stands_before(self, self.outside)
        self.hooks = self.pack, self.unpack
        # of hooks outside, those of a report are known to hold what they are given
        self._parts = Parts(self.outside) if self.outside is None or current.watcher is not None else None
        # what each node saved, in order, by its number
        self._by_node: dict[int, list[weakref.ref[Held]]] = {}
        # the output of each node that saved its own output, by its number
        self._outputs: dict[int, weakref.ref[Held]] = {}
        # what is computed again, by the id of the tensor object, as long as that lives
        self._made: dict[int, tuple[weakref.ref[Tensor], int, weakref.ref[Held]]] = {}

    def pack(self, x: Tensor) -> Held:
        """What autograd is to hold in place of x [any shape], which it saves now."""
        if self._parts is not None:
            self._parts.settle()
        own = own_tensors.take(x)
        held = None if own or current.call is None else current.call.pack(x)
        held = held or self._smaller(x, own) or self._whole(x)
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
        if self._parts is not None:
            self._parts.close()
        self._by_node.clear()
        self._outputs.clear()
        self._made.clear()

    def held_for(self, x: Tensor) -> Held:
        """What is to be held in place of x, which was saved a while ago, and has not been written on since."""
        return self._smaller(x) or self._whole(x)

    def _smaller(self, x: Tensor, own: bool = False) -> Held | None:
        node = x.grad_fn
        if x.numel() < _SMALL or (node is None and isinstance(x, Parameter)):
            return None
        held = self._computed(x) if node is not None else None
        if held is not None or own:
            return held
        return self._recorded(x) or self._functional(x) or self._packed(x)

    def _whole(self, x: Tensor) -> Kept:
        """x as it is, or a copy of it if it is a part of what nobody else will hold."""
        held = self._kept(x)
        if self._parts is not None:
            self._parts.note(held, x)
        return held

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
        found = self._copied(x) or self._gathered(x) or self._pointwise(x)
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
        """Made again from outputs [B, H, S, D] of torch's attention, if x is their copy as [B, S, H, D]."""
        found = attention_in_order(x)
        if found is None:
            return None
        references = [self._outputs.get(node._sequence_nr()) for node in found.nodes]
        held = [reference() for reference in references if reference is not None]
        sources = [source for source in held if source is not None]
        return (found.compute, sources) if len(sources) == len(found.nodes) else None

    def _gathered(self, x: Tensor) -> tuple[Callable[..., Tensor], list[Held]] | None:
        """Made again from a weight and indices, if x is some rows of the weight: for experts one for each token."""
        weight = gathered_from(x.grad_fn)
        index = None if weight is None else self._saved_by(x.grad_fn)
        return (rows, [self._kept(weight), *index]) if weight is not None and index and len(index) == 1 else None

    def _saved_by(self, node: Any) -> list[Held]:
        """What a node holds."""
        saved = [reference() for reference in self._by_node.get(node._sequence_nr(), ())]
        return [held for held in saved if held is not None]

    def _sources(self, row: Pointwise, node: Any) -> list[Held] | None:
        """What a node holds, if it holds all of its inputs; else None."""
        found = self._saved_by(node)
        if len(found) == 1 and isinstance(found[0], Mask) and found[0].dropped is not None:
            found.append(found[0].dropped)
        return found if len(found) == row.tensors else None

    def _functional(self, x: Tensor) -> Mask | Made | None:
        """Kept in fewer bytes, if a function of torch.nn.functional saves x now of which it is known how."""
        # from here to the function that saves
        frames = 3
        narrow = narrow_indices(x, frames)
        if narrow is not None:
            return Made(Recipe(widened), (self._kept(narrow),))
        call = dropout_of_mask(x, frames)
        if call is None:
            return None
        dropped = self._computed(call.given) or self._recorded(call.given)
        return Mask(self._kept(pack_mask(x.bool())), x.shape, x.dtype, 1 - call.p, dropped)


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
