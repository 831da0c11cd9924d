"""What a compiled plan's code calls: a segment of a graph as a compiler has made it, and codecs around segments."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import SymInt, Tensor

from ..codecs import Codec
from ..private_apis.inductor import Boxed
from ..records import Stored
from .packing import Packed


class PackedInGraph(NamedTuple):
    """How a kept tensor is packed in the forward's graph.

    Attributes:
        packed: Where it is kept.
        codec: Its codec.
        tensors: What the codec makes of it, without data.
        meta: The codec's static data, in which sizes may be symbols.
    """

    packed: Packed
    codec: Codec
    tensors: tuple[Tensor, ...]
    meta: object

    def stored(self, *made: Any) -> Stored:
        """The record, of what the graph makes: the codec's tensors, then the sizes in its static data."""
        count = len(self.tensors)
        meta = self.meta if len(made) == count else with_sizes(self.meta, iter(made[count:]))
        return Stored(self.codec, made[:count], meta)

    def unpacked(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """The tensor, of the codec's tensors."""
        return self.packed.back(self.codec.unpack(tensors, self.meta))


def tensors_of(kept: Any) -> list[Tensor]:
    """In a backward: the tensors that a codec has made of what is kept."""
    slot, saved = kept
    return [saved[i] for i in slot.positions]


class Segment:
    """A part of a graph, in a compiler's code. It takes a list, which it empties, and returns the results.

    Args:
        code: The compiler's code.
        backward: Whether it is a part of a backward.
    """

    def __init__(self, code: Boxed, backward: bool) -> None:
        self._code, self._backward = code, backward
        # a graph names its nodes by it
        self.__name__ = "segment"
        # results that share memory with an input, or with an earlier result; None before the first run
        self._shared: list[tuple[int, int]] | None = None

    def __call__(self, given: list[Any]) -> Sequence[Any]:
        if self._shared == []:
            return self._code(given)
        inputs = list(given)
        if self._shared is not None:
            # the others are freed after their last readers
            needed = {-1 - j for _, j in self._shared if j < 0 and not self._backward}
            inputs = [x if i in needed else None for i, x in enumerate(inputs)]
        found = list(self._code(given))
        if self._shared is None:
            self._shared = list(_sharing(found, inputs))
        for i, j in self._shared:
            y, owner = found[i], found[j] if j >= 0 else inputs[-1 - j]
            # a gradient has memory of its own, because autograd keeps it and adds to it in place; an output is a view,
            # which has the version counter of what it shows
            found[i] = y.clone() if self._backward else owner.as_strided(y.shape, y.stride(), y.storage_offset())
        return found


def _sharing(found: Sequence[Any], inputs: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Which results are in the memory of which input (-1 is the first one) or of which earlier result."""
    owners = {x.untyped_storage().data_ptr(): -1 - i for i, x in enumerate(inputs) if isinstance(x, Tensor)}
    for i, y in enumerate(found):
        if isinstance(y, Tensor) and y.numel():
            owner = owners.setdefault(y.untyped_storage().data_ptr(), i)
            if owner != i:
                yield i, owner


def symbols_in(value: Any) -> list[SymInt]:
    """The sizes in a codec's static data that a graph for any sizes leaves open."""
    if isinstance(value, SymInt):
        return [value]
    if dataclasses.is_dataclass(value):
        value = [getattr(value, one.name) for one in dataclasses.fields(value)]
    return [x for one in value for x in symbols_in(one)] if isinstance(value, (tuple, list)) else []


def with_sizes(value: Any, sizes: Iterator[int]) -> Any:
    """The same data with numbers in the place of these sizes, in order."""
    if isinstance(value, SymInt):
        return next(sizes)
    if dataclasses.is_dataclass(value) and symbols_in(value):
        fields = [one.name for one in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: with_sizes(getattr(value, name), sizes) for name in fields})  # type: ignore[type-var]
    if isinstance(value, (tuple, list)) and symbols_in(value):
        return type(value)(with_sizes(one, sizes) for one in value)
    return value
