"""The net under all rules: a tensor that code without a rule saves is not kept if it can be recomputed.

While the forward of a patched model runs, saved-tensor hooks look at every tensor that autograd saves. It is not kept

- if the registry has a derived record of it (the output of a norm that an unknown attention reads),
- if the autograd node that made it keeps everything that it was made of (the product of gate and up), or took it from
  a parameter (the weights of batched experts, one for each token; embeddings of relative positions),
- if it is a part of a weight that an adapter has made (`adapted.py`),
- if it is a sum or a concatenation of such tensors or of tensors that are kept (`joined.py`),
- if it is the mask of `torch.nn.functional.dropout`: that is kept as bits.

A part of a larger tensor is kept as a copy where nothing else holds the rest (`parts.py`), and the indices of a
max-pooling are kept in as few bytes as the image needs.

Under a lossy preset, the large activations that are left are kept through a codec.

Hooks switch torch's own check for in-place writes off, so the net compares versions and raises torch's error itself.
Outer hooks (`save_on_cpu`, a report) get the tensors that the net keeps. Inside of a checkpointed region the hooks of
the checkpoint are the innermost, and the net sees nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from ..codecs import IDENTITY, Codec
from ..private_apis import next_sequence_number, saved_tensor_hooks_allowed
from ..reference.bits import pack_mask
from ._current import Netting, current
from .activations import codec_for, is_activation
from .adapted import Keeping, Weights
from .entry import Noted
from .functional import dropout_of_mask, is_saved_by_checkpointing, narrow_indices, widened
from .held import Held, Kept, Made, Mask, counted, value_of
from .joined import Finder, Trials, is_asked, is_exact, joined, made_exactly, made_in_order, slotted, unsharded
from .nodes import Pointwise, computation, gathered_from, pointwise, proved
from .outside import hooks_outside, stands_before
from .padding import checkpointed, is_dropped, keeps_nothing_new, rows_left_out
from .parts import Parts, is_part
from .record import Derived, Record, is_lossless
from .registry import known_record, record_before_write, whole_record_of
from .saving import Leaves, Slot, own_tensors, slot_of
from .views import extent, in_same_memory

# tensors with fewer elements are kept
_SMALL = 256


class Net(Netting):
    """The hooks of one forward. Autograd holds them as long as the graph, so nothing here may hold a tensor."""

    def __init__(self, codec: Codec | None, proved: dict[Hashable, bool]) -> None:
        self.codec = codec
        # the hooks that were active before the net; they get what the net keeps
        self.outside = hooks_outside()
        stands_before(self, self.outside)
        self.hooks = self.pack, self.unpack
        # parts are copied only if it is known who holds the whole tensor; among outer hooks, only those of a report are
        # known to hold their input
        readable = self.outside is None or current.watcher is not None
        self._parts = Parts(self.outside) if readable else None
        self._trials = Trials(proved, self.outside, readable)
        # number of a node -> what it saved, in order
        self._by_node: dict[int, list[weakref.ref[Held]]] = {}
        # number of a node and of its output -> that output, saved by this node or by another one
        self._outputs: dict[tuple[int, int], weakref.ref[Held]] = {}
        # outer hooks may move away what entries hold
        self.declared = Noted(self._parts is not None)
        self._weights = Weights(self.declared)
        # how the tensor is recomputed about which an op of ours has asked last
        self._asked: Held | None = None
        # id of a tensor object -> how it is recomputed; an entry ends with the object
        self._made: dict[int, tuple[weakref.ref[Tensor], int, weakref.ref[Held]]] = {}

    def pack(self, x: Tensor) -> Held:
        """What autograd holds in place of x [any shape], which is being saved."""
        # the current node's number, read before a proof makes further nodes; checkpointing saves inputs without a node
        number = None if is_saved_by_checkpointing(1) else next_sequence_number() - 1
        if self._parts is not None:
            self._parts.settle()
        own = own_tensors.take(x)
        held = None if own or current.call is None else current.call.pack(x)
        held = held or self._smaller(x, own) or self._whole(x)
        if number is not None:
            self._by_node.setdefault(number, []).append(weakref.ref(held))
        if x.grad_fn is not None and not x._version:
            self._outputs.setdefault((x.grad_fn._sequence_nr(), x.output_nr), weakref.ref(held))
        return counted(held)

    def makes(self, x: Tensor) -> bool:
        """See `Netting`."""
        self._asked = self._computed(x, own=True)
        return self._asked is not None

    def is_made(self, x: Tensor) -> bool:
        """See `Netting`."""
        return any(t is not None and self._known(t) is not None for t in (x, x._base))

    def unpack(self, held: Held) -> Tensor:
        """x again. Raises RuntimeError, as torch does, if a kept tensor was written in place."""
        return value_of(held, self.outside)

    def close(self) -> None:
        """Drop what only a forward in progress needs. The hooks are methods of this object and keep it alive."""
        del self.hooks
        self.declared.clear()
        self._weights.clear()
        if self._parts is not None:
            self._parts.close()
        self._asked = None
        self._by_node.clear()
        self._outputs.clear()
        self._made.clear()

    def held_for(self, x: Tensor) -> Held:
        """What to hold in place of x, which was saved a while ago and has not been written since."""
        return counted(self._smaller(x) or self._whole(x))

    def _smaller(self, x: Tensor, own: bool = False) -> Held | None:
        node = x.grad_fn
        if x.numel() < _SMALL or (node is None and isinstance(x, Parameter)):
            return None
        held = self._computed(x, own) if node is not None else None
        if held is not None or own:
            return held
        return self._recorded(x) or self._functional(x) or self._packed(x)

    def _whole(self, x: Tensor) -> Kept:
        """x as it is, or a copy if x is a part of a tensor whose rest nobody will hold."""
        held = self._kept(x)
        if self._parts is not None:
            self._parts.note(held, x)
        return held

    def _kept(self, *tensors: Tensor, slot: Slot | None = None) -> Kept:
        # aliases without a graph, because the graph may hold this object. A leaf is kept itself, because FSDP2 and
        # ZeRO-3 move its data
        parts = tuple(x if x.grad_fn is None else x.detach() for x in tensors)
        if self.outside is None:
            return Kept(parts, tuple(x._version for x in parts), slot)
        return Kept(tuple(map(self.outside[0], parts)), None, slot)

    def _recorded(self, x: Tensor) -> Held | None:
        """How x is recomputed by its record in the registry, which knows our ops' tensors; None without a record."""
        record = known_record(x)
        if record is None or is_dropped(record):
            # padding rows are dropped only in ops that check the gradient in those rows
            return None
        lossless = is_lossless(record)
        if (lossless and not isinstance(record, Derived)) or not (lossless or self.codec):
            return None
        return self._by_record(record)

    def _packed(self, x: Tensor) -> Held | None:
        """x packed by the codec, if x is an activation. Any other tensor that no rule knows is kept as it is."""
        if self.codec is None or not is_activation(x):
            return None
        return self._by_record(whole_record_of(x, codec_for(x, self.codec)))

    def _by_record(self, record: Record) -> Kept | Made:
        leaves = Leaves()
        slot = slot_of(record, leaves)
        known = [None if x.grad_fn is None else self._known(x) for x in leaves.tensors]
        if any(known):
            sources = [self._kept(x) if held is None else held for held, x in zip(known, leaves.tensors, strict=True)]
            return Made(slotted(slot), sources)
        return self._kept(*leaves.tensors, slot=slot)

    def _computed(self, x: Tensor, own: bool = False) -> Made | None:
        """How x is recomputed from what its autograd node holds; for a view, from what its base's node holds.

        Our own ops keep gathered rows of a weight as they are, because without a report they do not ask the net about
        them. Checkpointing does the same, because its codec must not take more than what it replaces.
        """
        base = x if x._base is None or x._base.numel() != x.numel() else x._base
        # stack frames between this one and the function that saves
        if gathered_from(base.grad_fn) is not None and (own or is_saved_by_checkpointing(3)):
            return None
        held = self._known(base) or self._by_its_node(base, own)
        if held is None or (x.shape == base.shape and x.stride() == base.stride()):
            return held
        if extent(x) > extent(base) or base.storage_offset() != x.storage_offset():
            return None
        return Made(partial(in_same_memory, shape=x.shape, stride=x.stride()), (held,))

    def _known(self, x: Tensor) -> Made | None:
        known = self._made.get(id(x))
        if known is None or known[0]() is not x or known[1] != x._version:
            return None
        held = known[2]()
        return held if isinstance(held, Made) else None

    def _by_its_node(self, x: Tensor, own: bool) -> Made | None:
        # it may have been modified in place under no_grad, which its node does not show
        found = None if x._version else self._of_weight(x) or self._pointwise(x.grad_fn, x)
        # without a report, our own ops ask about these alone
        joins = found is None and (not own or is_asked(x) or is_part(x))
        held = made_in_order(*found, x) if found else self._joined(x) if joins else None
        if held is not None:
            key = id(x)
            self._made[key] = weakref.ref(x, lambda _: self._made.pop(key, None)), x._version, weakref.ref(held)
        return held

    def _joined(self, x: Tensor) -> Made | None:
        """How x is recomputed, if it is a sum or another join of tensors that are held, or made from held ones."""
        first = None
        if x._version:
            # a sum in place is the only write since the record was declared, so this record gives the first summand
            first = self._by_declared(record_before_write(x)) if rows_left_out(x) is None else None
        # a tensor that sees an element twice cannot be copied in its order in memory
        if (x._version and first is None) or 0 in x.stride() or isinstance(x._base, Parameter):
            return None
        finder = Finder(x, partial(self._output, x), self.saved_by, self._kept)
        if (found := joined(x.grad_fn, x.output_nr, finder, first)) is None:
            return None
        held = made_in_order(found.compute, found.sources, x, joined=True)
        return held if self._trials.pass_for(held, x, found.kind) else None

    def _output(self, x: Tensor, node: Any, number: int) -> Held | None:
        """What is held for the output of a node with that number; x is what is made of it."""
        if isinstance(weight := getattr(node, "variable", None), Parameter):
            return unsharded(self._kept(weight), x)
        saved = self._outputs.get((node._sequence_nr(), number))
        if saved is not None and (held := saved()) is not None and is_exact(held):
            return held
        declared = self._by_declared(self.declared.record(node, number))
        found = self._pointwise(node, x) if declared is None and number == 0 else None
        return declared if found is None else made_exactly(*found, x)

    def _by_declared(self, record: Record | Made | None) -> Kept | Made | None:
        """What is held by a record that keeps nothing new; None if it may."""
        if record is None or isinstance(record, Made):
            return record
        return self._by_record(record) if keeps_nothing_new(record) else None

    def _pointwise(self, node: Any, x: Tensor) -> tuple[Callable[..., Tensor], list[Held]] | None:
        """How a node's output is recomputed, if the node saved its inputs; x is that output, or what is made of it."""
        row = pointwise(node)
        sources = None if row is None else self._sources(row, node)
        if row is None or sources is None or not proved(node, row, x.dtype, x.device):
            return None
        return computation(row, node), sources

    def _of_weight(self, x: Tensor) -> tuple[Callable[..., Tensor], list[Held]] | None:
        """How x is recomputed, if it is a part or rows of a weight (an expert's weight for each token); else None."""
        return self._weights.made(x, Keeping(self.saved_by, self._kept, self._by_record))

    def saved_by(self, node: Any) -> list[Held]:
        """See `Netting`."""
        saved = [reference() for reference in self._by_node.get(node._sequence_nr(), ())]
        return [held for held in saved if held is not None]

    def _sources(self, row: Pointwise, node: Any) -> list[Held] | None:
        """What autograd holds for a node, if the node saved all of its inputs; else None."""
        found = self.saved_by(node)
        if len(found) == 1 and isinstance(found[0], Mask) and found[0].given is not None:
            found.append(found[0].given)
        return found if len(found) == row.tensors else None

    def _functional(self, x: Tensor) -> Mask | Made | None:
        """x in fewer bytes, if a known function of torch.nn.functional is saving it; else None."""
        # stack frames between this one and the function that saves
        frames = 3
        if (narrow := narrow_indices(x, frames)) is not None:
            return Made(widened, (self._kept(narrow),))
        if (call := dropout_of_mask(x, frames)) is None:
            return None
        given = self._computed(call[0]) or self._recorded(call[0])
        return Mask(self._kept(pack_mask(x.bool())), x.shape, x.dtype, 1 - call[1], given)


@contextmanager
def netted(codec: Codec, proved: dict[Hashable, bool]) -> Iterator[None]:
    """While the block runs, autograd in this thread keeps nothing that can be recomputed. For one forward.

    Args:
        codec: How activations are stored that stock code saves and that cannot be recomputed.
        proved: What earlier forwards of the model have found out about its joined tensors (`joined.Trials`).
    """
    if not torch.is_grad_enabled() or checkpointed() or not saved_tensor_hooks_allowed():
        yield
        return
    net, before = Net(None if codec == IDENTITY else codec, proved), current.net
    try:
        with saved_tensors_hooks(*net.hooks):
            current.net = net
            yield
    finally:
        current.net = before
        net.close()
