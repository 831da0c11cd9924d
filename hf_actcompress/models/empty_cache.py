"""Caches for a second run of a module: a plain training forward makes a cache, and each layer finds nothing in it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer


@dataclass(frozen=True)
class EmptyCache:
    """A cache as one layer found it: without entries of that layer. It holds no tensor.

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
        return None if _holds_tensors(vars(layer) if layer is not None else None) else cls(copy.deepcopy(layer), index)

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


def empty_layers(cache: Any, indices: Sequence[int]) -> list[DynamicLayer] | None:
    """The cache's layers for the attentions of a model's layer: self attention, then cross attention if it has both.

    None if one of them has entries or the kind is unknown.
    """
    caches = [cache]
    if type(cache) is EncoderDecoderCache:
        caches = [cache.self_attention_cache, cache.cross_attention_cache]
    if len(caches) != len(indices):
        return None
    layers = [empty_layer(one, index) for one, index in zip(caches, indices, strict=True)]
    return None if None in layers else layers  # type: ignore[return-value]


def fill(cache: Any, layers: Sequence[DynamicLayer] | None, heads: Sequence[Tensor], index: int) -> None:
    """What `update(keys, values)` does for empty layers, without copies.

    Args:
        cache: The cache of these layers.
        layers: What `empty_layers` returned for them; None: a layer that stores only a part of its input (a window).
        heads: Keys and values of the first layer, then those of the second.
        index: Index of the layer.
    """
    if layers is None:
        cache.update(*heads, index)
        return
    for layer, keys, values in zip(layers, heads[::2], heads[1::2], strict=True):
        layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
        layer.keys, layer.values = keys, values
    if type(cache) is EncoderDecoderCache:
        cache.is_updated[index] = True


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensors, value))
    return isinstance(value, Tensor)
