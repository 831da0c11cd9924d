"""Attention functions that other libraries register with transformers, while a layer is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .. import compilation
from ..modules.attention import OURS
from ..ops import opaque

# the functions that a tracer looks into
_TRACED = {"sdpa", "eager", *OURS.values()}


@contextmanager
def foreign_functions_are_nodes() -> Iterator[None]:
    """While the block runs, each of these functions becomes one node in a trace of this thread."""
    found = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS if name not in _TRACED}
    for name, function in found.items():
        ALL_ATTENTION_FUNCTIONS[name] = _node(function)
    try:
        yield
    finally:
        for name, function in found.items():
            del ALL_ATTENTION_FUNCTIONS[name]
            if ALL_ATTENTION_FUNCTIONS.get(name) is not function:
                # it was registered with this object alone
                ALL_ATTENTION_FUNCTIONS[name] = function


def _node(function: Callable[..., Any]) -> Callable[..., Any]:
    def attend(module: Any, *args: Any, **kwargs: Any) -> Any:
        # another thread may run a model meanwhile
        if compilation.is_traced_plan():
            return opaque.attention(function, True, module, *args, **kwargs)
        return function(module, *args, **kwargs)

    return attend
