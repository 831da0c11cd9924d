"""Caches that a training forward makes empty, and that a layer fills: with keys and values, and with states.

What a layer puts into a cache is an output of its plan. Keys and values are known by the call of `update`. All else
(states of linear attention and of convolutions, keys of an indexer) is known by what the code, which runs in the trace,
has changed in the layer's part of the cache. Dictionaries that layers hand on are known in the same way.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import traceback
from transformers import DynamicCache, EncoderDecoderCache

from ..graphs.trace import LAID_OUT, NotTraced
from ..models.arguments import is_shared_dict
from ..records import replaced, tensors_in
from .empty_cache import fill, has_entries
from .noted import Number

# the parts of a decoder's cache that attends to an encoder, too
_PARTS = ("self_attention_cache", "cross_attention_cache")


class CachedStates(NamedTuple):
    """What a layer changes in its part of a cache, beside keys and values; or in a dictionary.

    Attributes:
        kind: The class of that part.
        before: Its attributes before; of a dictionary nothing, because its items are in the form of the call.
        after: The attributes that are others afterwards; each tensor is a place.
        size: How many tensors are in them.
    """

    kind: type
    before: dict[str, Any]
    after: dict[str, Any]
    size: int

    def begin_in(self, layer: Any) -> bool:
        """Whether a part of a cache is as it was before."""
        return type(layer) is self.kind and not has_entries(layer) and vars(layer) == self.before


class Slot(NamedTuple):
    """Where a layer puts keys and values, or states, or a note that the states of an encoder are there.

    Attributes:
        cache: Which one of the caches among the arguments.
        part: The attribute of that cache that takes them; empty for the cache itself.
        index: The index of the layer in it; or where it is: the place of an attribute, or of an argument of the call.
        is_flag: Whether it is such a note.
        states: The states; None for keys and values.
    """

    cache: int
    part: str
    index: Any
    is_flag: bool = False
    states: CachedStates | None = None

    @property
    def size(self) -> int:
        """How many tensors it takes."""
        return 0 if self.is_flag else 2 if self.states is None else self.states.size

    def of_call(self, integers: Sequence[int]) -> Slot:
        """The same slot, with an index that is an argument of the call."""
        return self if isinstance(self.index, int) else self._replace(index=integers[int(self.index[1])])

    def of(self, caches: list[Any]) -> Any:
        """The cache, or the part of it, that takes the keys and values."""
        return getattr(caches[self.cache], self.part) if self.part else caches[self.cache]

    def is_free(self, caches: list[Any]) -> bool:
        """Whether the cache hands back what it is given: it has nothing of that layer yet."""
        if self.is_flag:
            return not caches[self.cache].is_updated.get(self.index)
        cache = self.of(caches)
        if is_shared_dict(cache):
            return True
        if type(cache) is not DynamicCache or cache.offloading:
            return False
        if self.states is not None:
            return len(cache.layers) > self.index and self.states.begin_in(cache.layers[self.index])
        return bool(len(cache.layers) <= self.index or cache.get_seq_length(self.index) == 0)

    def fill(self, caches: list[Any], tensors: Sequence[Tensor]) -> None:
        """Put tensors there."""
        if self.is_flag:
            caches[self.cache].is_updated[self.index] = True
        elif self.states is None:
            keys, values = tensors
            fill(self.of(caches), keys, values, self.index)
        else:
            place = self.of(caches)
            place = place if is_shared_dict(place) else vars(place.layers[self.index])
            place.update(replaced(self.states.after, iter(tensors)))


# the slots of a call, with the tensors for each
Updates = list[tuple[Slot, Sequence[Tensor]]]


class _Copies:
    """Stands in the place of the list of a cache's parts: copies of them, one for each layer that the code asks for."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        # for each one: the index that was asked for, a copy, and the attributes that it had
        self._copies: dict[int, tuple[Any, Any, dict[str, Any]]] = {}

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: Any) -> Any:
        # an index that the code looks at would make a plan for each layer
        number = index.value if isinstance(index, Number) else index
        if number not in self._copies:
            layer = copy.copy(self._layers[number])
            if has_entries(layer):
                raise NotTraced("its cache has states already")
            before = _copied(vars(layer))
            vars(layer).update(_copied(before))
            self._copies[number] = index, layer, before
        return self._copies[number][1]

    def changes(self, cache: int, part: str) -> Updates:
        """What the code has changed in the copies."""
        found: Updates = []
        for index, layer, before in self._copies.values():
            new = {name: value for name, value in vars(layer).items() if _differs(value, before.get(name, _NOTHING))}
            if new:
                found.append(_update(cache, part, index, type(layer), before, new))
        return found


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """The same attributes in new containers."""
    return replaced(attributes, tensors_in(attributes))  # type: ignore[no-any-return]


def _update(cache: int, part: str, index: Any, kind: type, before: dict[str, Any], new: dict[Any, Any]) -> Any:
    """The slot for new values of attributes or items, with the tensors in them."""
    tensors = list(tensors_in(new))
    states = CachedStates(kind, before, replaced(new, repeat(None)), len(tensors))
    return Slot(cache, part, index, states=states), tensors


# is no value of an attribute
_NOTHING = object()


def _differs(new: Any, old: Any) -> bool:
    if new is old:
        return False
    if any(True for _ in tensors_in(new)):
        return True
    if _has_size(new):
        raise NotTraced("its cache is told a size that changes")
    return bool(new != old)


def _has_size(value: Any) -> bool:
    if isinstance(value, (dict, list, tuple)):
        return any(map(_has_size, value.values() if isinstance(value, dict) else value))
    return isinstance(value, torch.SymInt)


class RecordingCache(DynamicCache):
    """Stands in the place of an empty cache while a layer is traced. It hands back keys and values as they are given,
    copied as a cache copies them: how a product rounds may depend on where its numbers lie.

    Args:
        cache: The cache.
        number: Which of the caches among the arguments it is.
        part: Which part of it.
        updates: Takes each slot with what is put there.
    """

    def __init__(self, cache: Any, number: int, part: str, updates: Updates) -> None:
        super().__init__()
        self.layers: Any = _Copies(cache.layers)
        self._number, self._part, self._updates = number, part, updates

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: Any, *args: Any, **kwargs: Any) -> Any:
        with traceback.annotate({LAID_OUT: True}):
            heads = key_states.contiguous(), value_states.contiguous()
        self._updates.append((Slot(self._number, self._part, layer_idx), heads))
        return heads

    def get_seq_length(self, layer_idx: Any = 0, *args: Any, **kwargs: Any) -> int:
        return 0

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def note_states(self) -> None:
        """Add the states that it was given to the updates. When the layer has run."""
        self._updates.extend(self.layers.changes(self._number, self._part))


class _Flags(dict[Any, bool]):
    """Of a decoder's cache, for which layers the states of the encoder are there: for none. It does not look at keys,
    because an index that the code looks at would make a plan for each layer."""

    def __init__(self, number: int, updates: Updates) -> None:
        self._number, self._updates = number, updates

    def get(self, key: Any, default: Any = None) -> Any:
        return default

    def __setitem__(self, key: Any, value: bool) -> None:
        self._updates.append((Slot(self._number, "", key, is_flag=True), ()))


def stand_in(cache: Any, number: int, updates: Updates) -> Any:
    """What stands in the place of a cache while a layer is traced; of a dictionary: an empty one."""
    if is_shared_dict(cache):
        return type(cache)()
    if type(cache) is not EncoderDecoderCache:
        return RecordingCache(cache, number, "", updates)
    found = EncoderDecoderCache(*(RecordingCache(getattr(cache, part), number, part, updates) for part in _PARTS))
    found.is_updated = _Flags(number, updates)
    return found


def items_of(caches: Sequence[Any]) -> list[dict[Any, Any]]:
    """What is in the dictionaries among caches; for any other cache an empty one."""
    return [dict(cache) if is_shared_dict(cache) else {} for cache in caches]


def note_changes(caches: Sequence[Any], items: Sequence[dict[Any, Any]], updates: Updates) -> None:
    """Add what stand-ins were given beside keys and values. When the layer has run; `items` was in them before."""
    for i, (cache, before) in enumerate(zip(caches, items, strict=True)):
        for part in _parts(cache):
            part.note_states()
        now = items_of([cache])[0]
        if before.keys() - now.keys():
            raise NotTraced("it takes items out of a dictionary")
        new = {key: value for key, value in now.items() if value is not before.get(key)}
        if new:
            updates.append(_update(i, "", 0, type(cache), {}, new))


def is_filled(cache: Any) -> bool:
    """Whether a cache has keys and values of a layer, if only of one that ran before in the same forward."""
    return any(has_entries(layer) for part in _parts(cache) for layer in part.layers)


def fill_slots(slots: list[Slot], caches: list[Any], tensors: Sequence[Tensor]) -> None:
    """Put what a layer caches, which comes one after the other, into empty caches."""
    done = 0
    for slot in slots:
        slot.fill(caches, tensors[done : done + slot.size])
        done += slot.size


def _parts(cache: Any) -> list[Any]:
    if is_shared_dict(cache):
        return []
    return [getattr(cache, part) for part in _PARTS] if type(cache) is EncoderDecoderCache else [cache]
