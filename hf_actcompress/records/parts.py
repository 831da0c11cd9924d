"""Saved parts of larger tensors: a copy of a part is kept if nobody holds the rest of the tensor.

Queries, keys and values are often views of one product. Rotated queries and keys are new tensors, so a value that is
saved as a view holds three times its size. When it is saved, this is not known yet, because the rest may be saved
later. So the decision is made as soon as only saved parts hold the memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor, strided

from ..private_apis import FakeTensor, tensors_holding
from .held import Kept
from .outside import Hooks

# copies are worth it if the parts have at most this share of the whole's bytes
_WORTH = 0.75
# how many of the newest whole tensors are checked whenever a tensor is saved
_LAST = 4


def is_part(x: Tensor) -> bool:
    """Whether x is a view of so small a part of a result that keeping a copy of it may be worth it."""
    if x.grad_fn is None or type(x) not in (Tensor, FakeTensor) or x.layout is not strided:
        return False
    return x.nbytes <= _WORTH * x.untyped_storage().nbytes()


class Parts:
    """The kept parts, by the memory that they are in. It holds no tensor.

    Args:
        outside: The hooks outside of the net. Each value that they pack holds one alias of the tensor that they got.
            None if there are no outer hooks.
    """

    def __init__(self, outside: Hooks | None) -> None:
        self._outside = outside
        self._kept: dict[int, list[weakref.ref[Kept]]] = {}

    def note(self, held: Kept, x: Tensor) -> None:
        """Note that `held` keeps x as it is."""
        if is_part(x):
            self._kept.setdefault(x.untyped_storage()._cdata, []).append(weakref.ref(held))

    def settle(self) -> None:
        """Decide about copies, for those of the newest whole tensors whose memory only saved parts hold."""
        if self._kept:
            self._settle([*self._kept][-_LAST:])

    def close(self) -> None:
        """Decide about copies, at the end of the forward, for every whole tensor whose memory only saved parts hold."""
        self._settle([*self._kept])
        self._kept.clear()

    def _settle(self, wholes: Iterable[int]) -> None:
        for whole in wholes:
            kept = [(held, self._value(held)) for reference in self._kept[whole] if (held := reference()) is not None]
            kept = [(held, x) for held, x in kept if x.untyped_storage()._cdata == whole]
            if not kept:
                # the part has been freed meanwhile
                del self._kept[whole]
            elif tensors_holding(whole) <= len(kept):
                del self._kept[whole]
                self._copy(kept)

    def _value(self, held: Kept) -> Tensor:
        part: Tensor = held.parts[0]
        return part if self._outside is None else self._outside[1](held.parts[0])

    def _copy(self, kept: list[tuple[Kept, Tensor]]) -> None:
        """Replace each kept part by a copy of it, if the copies are smaller than the whole."""
        parts = {(x.storage_offset(), x.shape, x.stride()): x.nbytes for _, x in kept}
        written = any(held.versions is not None and held.versions != (x._version,) for held, x in kept)
        if written or sum(parts.values()) > _WORTH * kept[0][1].untyped_storage().nbytes():
            return
        copies: dict[object, Tensor] = {}
        for held, x in kept:
            place = x.storage_offset(), x.shape, x.stride()
            if place not in copies:
                # the copy's dimensions have the same order in memory
                copies[place] = x.clone()
            copy = copies[place]
            held.parts = (copy if self._outside is None else self._outside[0](copy),)
            held.versions = None if held.versions is None else (copy._version,)
