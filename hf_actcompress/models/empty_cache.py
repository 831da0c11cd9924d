"""Caches for a second run of a module: a plain training forward makes a cache, and each layer finds nothing in it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

from ..records import tensors_in


@dataclass(frozen=True)
class EmptyCache:
    """A cache as one layer found it: without entries of that layer.

    Attributes:
        layer: The layer's part of the cache; None: the cache makes it.
        index: Index of the layer.
        cross: The same for the cache of a cross attention, beside that of the self attention.
    """

    layer: Any
    index: int
    cross: EmptyCache | None = None

    @classmethod
    def of(cls, cache: Any, index: int) -> EmptyCache | None:
        """The cache as the layer of that index finds it; None if the layer has entries or the kind is unknown."""
        if type(cache) is EncoderDecoderCache:
            own, cross = (cls.of(c, index) for c in (cache.self_attention_cache, cache.cross_attention_cache))
            filled = own is None or cross is None or cache.is_updated.get(index)
            return None if filled or own is None else cls(own.layer, index, cross)
        if type(cache) is not DynamicCache:
            return None
        layer = cache.layers[index] if index < len(cache.layers) else None
        return None if layer is not None and has_entries(layer) else cls(copy.deepcopy(layer), index)

    def new(self) -> Cache:
        """A new cache of that kind, empty."""
        cache = DynamicCache()
        if self.layer is not None:
            cache.layers = [copy.deepcopy(self.layer)] * (self.index + 1)
        return cache if self.cross is None else EncoderDecoderCache(cache, self.cross.new())


def empty_layer(cache: Any, index: int) -> DynamicLayer | None:
    """The cache's layer of that index; None if it has entries, or does not keep keys and values as they are."""
    if type(cache) is not DynamicCache or cache.offloading:
        return None
    while len(cache.layers) <= index and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    layer: Any = cache.layers[index] if index < len(cache.layers) else None
    return layer if type(layer) is DynamicLayer and not layer.is_initialized else None


def fill(cache: Any, keys: Tensor, values: Tensor, index: int) -> None:
    """What `cache.update(keys, values, index)` does for an empty layer of that index, without copies."""
    layer = empty_layer(cache, index)
    if layer is None:
        # it stores only a part of its input (a window)
        cache.update(keys, values, index)
        return
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values


def has_entries(layer: Any) -> bool:
    """Whether a layer's part of a cache has tensors. One without dimensions is no entry: a window's size."""
    return any(x.dim() for x in tensors_in(vars(layer)))
