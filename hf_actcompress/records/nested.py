"""Tensors in the nested tuples, lists and dicts of a call's arguments.

A `UserDict` counts as a dict. transformers hands one from layer to layer, in which later layers find the keys and
values of earlier ones (Gemma 3n).
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Iterator
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, (dict, UserDict)):
        for item in value.values():
            yield from tensors_in(item)


_PLAIN = (bool, int, float, str)
# stands for a tensor in nested arguments
_PLACE = object()


def replaced(value: Any, by: Iterator[Any]) -> Any:
    """The same nested value with new leaves: each tensor or place becomes the next tensor of `by`, or else a place.

    The containers are new ones: later writes into them do not change the old ones.
    """
    if value is _PLACE or isinstance(value, Tensor):
        found = next(by)
        return found if isinstance(found, Tensor) else _PLACE
    if isinstance(value, (tuple, list)):
        items = [replaced(item, by) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: replaced(item, by) for key, item in value.items()}
    if isinstance(value, UserDict):
        other = copy.copy(value)
        other.data = {key: replaced(item, by) for key, item in value.items()}
        return other
    return value


def without_inference(value: Any) -> Any:
    """The same nested value with copies of tensors that were made in inference mode: autograd saves none of those.

    A model may be given such tensors by a frozen tower. Stock need not save them where it saves what is made of them.
    """
    if not _has_inference(value):
        return value
    return replaced(value, iter([x.clone() if x.is_inference() else x for x in tensors_in(value)]))


def _has_inference(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_inference()
    if isinstance(value, (dict, UserDict)):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return False
    # most arguments are numbers or None; this is asked of all arguments of each model in a step
    return any([_has_inference(item) for item in value if item is not None and type(item) not in _PLAIN])
