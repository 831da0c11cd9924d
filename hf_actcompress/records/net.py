"""The net under all rules: what code without a rule saves is kept in fewer bytes where that is known to be possible.

While the forward of a patched model runs, saved-tensor hooks look at every tensor that autograd saves. It is not kept

- if the registry has a derived record of it (the output of a norm that an unknown attention reads), or of the weight
  of which it is a part (an expert of a stack of weights that an adapter has made, `adapted.py`),
- if it is the mask of `torch.nn.functional.dropout`: that is kept as bits.

The indices of a max-pooling are kept in as few bytes as the image needs.

Under a lossy preset, the large activations that are left are kept through a codec.

Hooks switch torch's own check for in-place writes off, so the net compares versions and raises torch's error itself.
Outer hooks (`save_on_cpu`, a report) get the tensors that the net keeps. Inside of a checkpointed region the hooks of
the checkpoint are the innermost, and the net sees nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from ..codecs import IDENTITY, Codec
from ..private_apis import saved_tensor_hooks_allowed
from ._current import Netting, current
from .activations import codec_for, is_activation
from .adapted import part_of_adapted_weight
from .functional import smaller_record
from .held import Kept, counted, value_of
from .outside import hooks_outside, stands_before
from .padding import checkpointed, is_dropped
from .record import Derived, Record, is_lossless
from .registry import known_record, whole_record_of
from .saving import Leaves, Slot, slot_of

# tensors with fewer elements are kept
_SMALL = 256


class Net(Netting):
    """The hooks of one forward. Autograd holds them as long as the graph, so nothing here may hold a tensor."""

    def __init__(self, codec: Codec | None) -> None:
        self.codec = codec
        # the hooks that were active before the net; they get what the net keeps
        self.outside = hooks_outside()
        stands_before(self, self.outside)
        self.hooks = self.pack, self.unpack
        # hooks of others would copy the whole of an adapted weight for each part of it
        self._makes_parts = self.outside is None or current.watcher is not None

    def pack(self, x: Tensor) -> Kept:
        """What autograd holds in place of x [any shape], which is being saved."""
        return counted(self._smaller(x) or self._kept(x))

    def unpack(self, held: Kept) -> Tensor:
        """x again. Raises RuntimeError, as torch does, if a kept tensor was written in place."""
        return value_of(held, self.outside)

    def close(self) -> None:
        """Drop what only a forward in progress needs. The hooks are methods of this object and keep it alive."""
        del self.hooks

    def _smaller(self, x: Tensor) -> Kept | None:
        if x.numel() < _SMALL or (x.grad_fn is None and isinstance(x, Parameter)):
            return None
        return self._recorded(x) or self._functional(x) or self._packed(x)

    def _kept(self, *tensors: Tensor, slot: Slot | None = None) -> Kept:
        # aliases without a graph, because the graph may hold this object. A leaf is kept itself, because FSDP2 and
        # ZeRO-3 move its data
        parts = tuple(x if x.grad_fn is None else x.detach() for x in tensors)
        if self.outside is None:
            return Kept(parts, tuple(x._version for x in parts), slot)
        return Kept(tuple(map(self.outside[0], parts)), None, slot)

    def _recorded(self, x: Tensor) -> Kept | None:
        """How x is recomputed by its record in the registry, which knows our ops' tensors; None without a record."""
        record = known_record(x)
        if record is None and self._makes_parts:
            record = part_of_adapted_weight(x)
        if record is None or is_dropped(record):
            # padding rows are dropped only in ops that check the gradient in those rows
            return None
        lossless = is_lossless(record)
        if (lossless and not isinstance(record, Derived)) or not (lossless or self.codec):
            return None
        return self._by_record(record)

    def _packed(self, x: Tensor) -> Kept | None:
        """x packed by the codec, if x is an activation. Any other tensor that no rule knows is kept as it is."""
        if self.codec is None or not is_activation(x):
            return None
        return self._by_record(whole_record_of(x, codec_for(x, self.codec)))

    def _by_record(self, record: Record) -> Kept:
        leaves = Leaves()
        slot = slot_of(record, leaves)
        return self._kept(*leaves.tensors, slot=slot)

    def _functional(self, x: Tensor) -> Kept | None:
        """x in fewer bytes, if a known function of torch.nn.functional is saving it; else None."""
        # stack frames between this one and the function that saves
        record = smaller_record(x, frames=3)
        return None if record is None else self._by_record(record)


@contextmanager
def netted(codec: Codec) -> Iterator[None]:
    """While the block runs, autograd in this thread keeps what stock code saves in fewer bytes. For one forward.

    Args:
        codec: How activations are stored that stock code saves and that cannot be recomputed.
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
