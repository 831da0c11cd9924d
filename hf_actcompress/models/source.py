"""The names in the code of a module, read from its compiled functions without running them."""

from __future__ import annotations

import inspect
import sys
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn


def names_in(module: nn.Module) -> frozenset[str]:
    """The names that a module's forward uses, also in its class's own methods and in helpers of the same file."""
    return _names_in(type(module))  # type: ignore[arg-type]


@cache
def _names_in(kind: Any) -> frozenset[str]:
    forward = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
    found: set[str] = set()
    pending, seen = [forward], set[int]()
    while pending:
        function = pending.pop()
        code = getattr(function, "__code__", None)
        if code is None or id(code) in seen:
            continue
        seen.add(id(code))
        names = set(_names(code))
        found |= names
        pending += [called for name in names if (called := _called(kind, function, name)) is not None]
    return frozenset(found)


def _names(code: CodeType) -> list[str]:
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _names(const)]
    return [*code.co_names, *inner]


def _called(kind: type, function: Any, name: str) -> Any:
    """The method of the class, or the function of the same file, with that name; None for everything else."""
    method = inspect.getattr_static(kind, name, None)
    own = sys.modules.get(kind.__module__)
    helper = getattr(function, "__globals__", {}).get(name)
    for candidate in (method, helper):
        candidate = inspect.unwrap(candidate) if isinstance(candidate, FunctionType) else candidate
        code = getattr(candidate, "__code__", None)
        if code is not None and own is not None and code.co_filename == getattr(own, "__file__", None):
            return candidate
    return None
