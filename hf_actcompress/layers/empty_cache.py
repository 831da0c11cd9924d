"""How an empty part of a cache is filled, as a training forward does: each layer finds nothing in it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ..records import tensors_in


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
