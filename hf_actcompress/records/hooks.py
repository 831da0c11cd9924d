"""Saved-tensor hooks that keep one tensor of stock code through a codec, and that compose with outer hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..codecs import Codec
from ..private_apis import innermost_saved_tensor_hooks
from .held import Kept, value_of
from .outside import hooks_outside, stands_before
from .record import Stored
from .saving import Leaves, slot_of_new


@contextmanager
def kept_through(codec: Codec, x: Tensor) -> Iterator[None]:
    """While the block runs, autograd saves x [any shape] through `codec`, and every other tensor as it is.

    Only x is packed, because another saved tensor may be a mask, a weight or an index. Outer hooks (`save_on_cpu`, a
    report) get the packed tensors.
    """
    outside = innermost_saved_tensor_hooks()

    def pack_outside(x: Tensor) -> Any:
        return x if outside is None else outside[0](x)

    # autograd holds the hooks as long as what they packed, so the hooks must not hold x
    packing = [x]

    def pack(saved: Tensor) -> Kept:
        if not packing or not _is(saved, packing[0]):
            return Kept((pack_outside(saved),), None, None)
        record = Stored(codec, *codec.pack(saved.detach()))
        return Kept(tuple(map(pack_outside, record.tensors)), None, slot_of_new(record, Leaves()))

    stands_before(pack, hooks_outside())
    try:
        with saved_tensors_hooks(pack, lambda held: value_of(held, outside)):
            yield
    finally:
        packing.clear()


def _is(saved: Tensor, x: Tensor) -> bool:
    """Whether `saved` is autograd's alias of x. The storages are compared, because fake tensors have no address."""
    same = saved.untyped_storage()._cdata == x.untyped_storage()._cdata and saved.shape == x.shape
    return same and saved.storage_offset() == x.storage_offset() and saved.stride() == x.stride()
