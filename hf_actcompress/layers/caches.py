"""Caches of keys and values that a training forward makes empty, and that a layer fills."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache

from ..models.empty_cache import empty_layer, fill


class RecordingCache(DynamicCache):
    """Stands in the place of an empty cache while a layer is traced: it hands back what it is given.

    Attributes:
        updates: For each update, keys and values, and the index of the layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.updates: list[tuple[Tensor, Tensor, Any]] = []

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: Any, *args: Any, **kwargs: Any) -> Any:
        self.updates.append((key_states, value_states, layer_idx))
        return key_states, value_states

    def get_seq_length(self, layer_idx: Any = 0, *args: Any, **kwargs: Any) -> int:
        return 0


def is_empty(cache: Any, index: int) -> bool:
    """Whether an update of the cache hands back what it is given: the cache has nothing of that layer yet."""
    if type(cache) is not DynamicCache or cache.offloading:
        return False
    return len(cache.layers) <= index or cache.get_seq_length(index) == 0


def filled(cache: Any, keys: Tensor, values: Tensor, index: int) -> None:
    """Put a layer's keys and values into an empty cache."""
    layer = empty_layer(cache, index)
    fill(cache, None if layer is None else [layer], [keys, values], index)
