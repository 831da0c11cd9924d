"""Saved-tensor hooks that keep one tensor of stock code through a codec, and that compose with outer hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..codecs import Codec
from ..private_apis import innermost_saved_tensor_hooks
from .outside import hooks_outside, stands_before


@dataclass(frozen=True)
class _Held:
    """What autograd holds in place of a saved tensor: what the outer hooks returned for each of its parts."""

    parts: tuple[Any, ...]
    codec: Codec | None = None
    meta: object = None


@contextmanager
def kept_through(codec: Codec, x: Tensor) -> Iterator[None]:
    """While the block runs, autograd saves x [any shape] through `codec`, and every other tensor as it is.

    Only x is packed, because another saved tensor may be a mask, a weight or an index. Outer hooks (`save_on_cpu`, a
    report) get the packed tensors.
    """
    outside = innermost_saved_tensor_hooks()
    pack_outside, unpack_outside = outside if outside is not None else (_same, _same)
    # autograd holds the hooks as long as what they packed, so the hooks must not hold x
    packing = [x]

    def pack(saved: Tensor) -> _Held:
        if not packing or not _is(saved, packing[0]):
            return _Held((pack_outside(saved),))
        tensors, meta = codec.pack(saved.detach())
        return _Held(tuple(pack_outside(tensor) for tensor in tensors), codec, meta)

    def unpack(held: _Held) -> Tensor:
        tensors = tuple(unpack_outside(part) for part in held.parts)
        return tensors[0] if held.codec is None else held.codec.unpack(tensors, held.meta)

    stands_before(pack, hooks_outside())
    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    finally:
        packing.clear()


def _same(x: Tensor) -> Tensor:
    return x


def _is(saved: Tensor, x: Tensor) -> bool:
    """Whether `saved` is autograd's alias of x. The storages are compared, because fake tensors have no address."""
    same = saved.untyped_storage()._cdata == x.untyped_storage()._cdata and saved.shape == x.shape
    return same and saved.storage_offset() == x.storage_offset() and saved.stride() == x.stride()
