"""The arguments of a call: by their names in the forward, and the cache among them.

The names are cached, because every step needs them.
"""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from transformers import Cache


@cache
def argument_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the positional arguments of a forward, without `self`.

    Args:
        forward: A function of a class, as it is looked up there, perhaps with wrappers around it.
    """
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = inspect.signature(inspect.unwrap(forward)).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)[1:]


def arguments(stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call, by name; a positional argument without a name has its number."""
    if not args:
        return dict(kwargs)
    function = getattr(stock, "__func__", None)
    if function is None:
        # somebody has wrapped the forward of this one model
        return {**inspect.signature(stock).bind_partial(*args).arguments, **kwargs}
    names = argument_names(function)
    return {**{names[i] if i < len(names) else str(i): x for i, x in enumerate(args)}, **kwargs}


def is_cache(value: Any) -> bool:
    """Whether an argument is a cache of keys and values, whatever its name is in this model and release."""
    return isinstance(value, Cache)


def is_shared_dict(value: Any) -> bool:
    """Whether an argument is a dictionary, through which layers may hand on tensors (Gemma 4's shared keys)."""
    return type(value) is dict or isinstance(value, UserDict)


def cache_in(values: Iterable[Any]) -> Any:
    """The first cache among the arguments of a call; None if there is none."""
    for value in values:
        if isinstance(value, Cache):
            return value
    return None
