"""Caches of keys and values that a training forward makes empty, and that a layer fills."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import traceback
from transformers import DynamicCache, EncoderDecoderCache

from ..graphs.trace import LAID_OUT
from ..models.empty_cache import fill

# the parts of a decoder's cache that attends to an encoder, too
_PARTS = ("self_attention_cache", "cross_attention_cache")


class Slot(NamedTuple):
    """Where a layer puts keys and values, or, with `is_flag`, that it notes that the states of an encoder are there.

    Attributes:
        cache: Which one of the caches among the arguments.
        part: The attribute of that cache that takes them; empty for the cache itself.
        index: The index of the layer in it, or where it is.
        is_flag: Whether it is the note.
    """

    cache: int
    part: str
    index: Any
    is_flag: bool = False

    def of(self, caches: list[Any]) -> Any:
        """The cache, or the part of it, that takes the keys and values."""
        return getattr(caches[self.cache], self.part) if self.part else caches[self.cache]

    def is_free(self, caches: list[Any]) -> bool:
        """Whether the cache hands back what it is given: it has nothing of that layer yet."""
        if self.is_flag:
            return not caches[self.cache].is_updated.get(self.index)
        cache = self.of(caches)
        if type(cache) is not DynamicCache or cache.offloading:
            return False
        return bool(len(cache.layers) <= self.index or cache.get_seq_length(self.index) == 0)


class RecordingCache(DynamicCache):
    """Stands in the place of an empty cache while a layer is traced: it hands back what it is given, copied as a cache
    copies it. How a product rounds may depend on where its numbers lie.

    Args:
        number: Which of the caches among the arguments it is.
        part: Which part of it.
        updates: Takes the slot, keys and values of each update.
    """

    def __init__(self, number: int, part: str, updates: list[tuple[Slot, Any]]) -> None:
        super().__init__()
        self._number, self._part, self._updates = number, part, updates

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: Any, *args: Any, **kwargs: Any) -> Any:
        with traceback.annotate({LAID_OUT: True}):
            heads = key_states.contiguous(), value_states.contiguous()
        self._updates.append((Slot(self._number, self._part, layer_idx), heads))
        return heads

    def get_seq_length(self, layer_idx: Any = 0, *args: Any, **kwargs: Any) -> int:
        return 0


class _Flags(dict[Any, bool]):
    """Of a decoder's cache, for which layers the states of the encoder are there: for none. It does not look at keys,
    because an index that the code looks at would make a plan for each layer."""

    def __init__(self, number: int, updates: list[tuple[Slot, Any]]) -> None:
        self._number, self._updates = number, updates

    def get(self, key: Any, default: Any = None) -> Any:
        return default

    def __setitem__(self, key: Any, value: bool) -> None:
        self._updates.append((Slot(self._number, "", key, is_flag=True), ()))


def stand_in(cache: Any, number: int, updates: list[tuple[Slot, Any]]) -> Any:
    """What stands in the place of a cache while a layer is traced."""
    if type(cache) is not EncoderDecoderCache:
        return RecordingCache(number, "", updates)
    found = EncoderDecoderCache(*(RecordingCache(number, part, updates) for part in _PARTS))
    found.is_updated = _Flags(number, updates)
    return found


def is_filled(cache: Any) -> bool:
    """Whether a cache has keys and values of a layer, if only of one that ran before in the same forward."""
    parts = [getattr(cache, part) for part in _PARTS] if type(cache) is EncoderDecoderCache else [cache]
    return any(len(part.layers) and part.get_seq_length() for part in parts)


def fill_slots(slots: list[Slot], caches: list[Any], heads: tuple[Tensor, ...]) -> None:
    """Put a layer's keys and values, which come one after the other, into empty caches."""
    rest = iter(heads)
    for slot in slots:
        if slot.is_flag:
            caches[slot.cache].is_updated[slot.index] = True
            continue
        fill(slot.of(caches), next(rest), next(rest), slot.index)
