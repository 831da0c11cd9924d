"""Parts of larger tensors that are saved: copies of them are kept where nobody holds the rest.

Queries, keys and values are often views of one product. Rotated queries and keys are new tensors, so a value that is
saved as a view holds three times its size. Nobody knows that when it is saved, because the rest may be saved later. So
it is decided as soon as nothing but saved parts holds the memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from torch import Tensor, strided

from ..private_apis import FakeTensor, tensors_holding
from .held import Kept
from .outside import Hooks

# of the bytes of the whole: what the parts may have, for copies of them to be worth it
_WORTH = 0.75
# of the newest wholes: how many are looked at each time that something is saved
_LAST = 4


def is_part(x: Tensor) -> bool:
    """Whether x is a view of a result of which it has so little that a copy of it may be worth it."""
    if x.grad_fn is None or type(x) not in (Tensor, FakeTensor) or x.layout is not strided:
        return False
    return x.nbytes <= _WORTH * x.untyped_storage().nbytes()


class Parts:
    """The parts that are kept, by the memory that they are in. It holds no tensor.

    Args:
        outside: The hooks outside of the net, each of whose packed values holds one alias of what it was given; None if
            there are none.
    """

    def __init__(self, outside: Hooks | None) -> None:
        self._outside = outside
        self._kept: dict[int, list[weakref.ref[Kept]]] = {}

    def note(self, held: Kept, x: Tensor) -> None:
        """x is kept by `held`, as it is."""
        if is_part(x):
            self._kept.setdefault(x.untyped_storage()._cdata, []).append(weakref.ref(held))

    def settle(self, last: int = _LAST) -> None:
        """Decide for those of the last wholes that only parts hold."""
        if self._kept:
            self._settle([*self._kept][-last:])

    def close(self) -> None:
        """The forward ends: decide for all that can be decided."""
        self._settle([*self._kept])
        self._kept.clear()

    def _settle(self, wholes: Iterable[int]) -> None:
        for whole in wholes:
            kept = [(held, self._value(held)) for reference in self._kept[whole] if (held := reference()) is not None]
            kept = [(held, x) for held, x in kept if x.untyped_storage()._cdata == whole]
            if not kept:
                # it is gone
                del self._kept[whole]
            elif tensors_holding(whole) <= len(kept):
                del self._kept[whole]
                self._copy(kept)

    def _value(self, held: Kept) -> Tensor:
        part: Tensor = held.parts[0]
        return part if self._outside is None else self._outside[1](held.parts[0])

    def _copy(self, kept: list[tuple[Kept, Tensor]]) -> None:
        """Put a copy of its part into each, if that is less than the whole."""
        parts = {(x.storage_offset(), x.shape, x.stride()): x.nbytes for _, x in kept}
        written = any(held.versions is not None and held.versions != (x._version,) for held, x in kept)
        if written or sum(parts.values()) > _WORTH * kept[0][1].untyped_storage().nbytes():
            return
        copies: dict[object, Tensor] = {}
        for held, x in kept:
            place = x.storage_offset(), x.shape, x.stride()
            if place not in copies:
                # in the same order of dimensions
                copies[place] = x.clone()
            copy = copies[place]
            pack: Callable[[Tensor], object] = _itself if self._outside is None else self._outside[0]
            held.parts = (pack(copy),)
            held.versions = None if held.versions is None else (copy._version,)


def _itself(x: Tensor) -> Tensor:
    return x
