"""Copies of stock functions in which some global names stand for our functions. No file of transformers is changed."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from operator import is_not
from types import CellType, CodeType, FunctionType
from typing import Any


class GlobalsCopy:
    """A stock function, and a copy of it over a copy of its file's globals, in which some names are other objects.

    The copy sees the current globals when it is called: it is made anew if a global that it reads was replaced. The
    wrappers of the function's decorators are copied, too.

    Args:
        stock: The function, with its decorators.
        ours: The name of a global -> what the copy finds under it.

    Raises:
        ValueError: A decorator does not hold the function where a copy of it could be put.
    """

    def __init__(self, stock: Any, ours: Mapping[str, Any]) -> None:
        self.stock, self._ours = stock, dict(ours)
        self._inner = inspect.unwrap(stock)
        self._replaced = {name: self._inner.__globals__[name] for name in ours}
        self._names = tuple(_global_names(self._inner.__code__))
        self._made = self._make()

    def is_of(self, stock_class: Any) -> bool:
        """Whether the class's forward and the replaced globals are still those that were copied."""
        found = self._inner.__globals__
        return stock_class.forward is self.stock and all(found.get(n) is x for n, x in self._replaced.items())

    @property
    def copy(self) -> Callable[..., Any]:
        """The copy, with the current globals."""
        seen, copy = self._made
        if any(map(is_not, seen, self._seen())):
            self._made = _, copy = self._make()
        return copy

    def _seen(self) -> Iterator[Any]:
        return map(self._inner.__globals__.get, self._names)

    def _make(self) -> tuple[tuple[Any, ...], Callable[..., Any]]:
        seen = tuple(self._seen())
        return seen, _copied(self.stock, {**self._inner.__globals__, **self._ours})


def read_global(stock_class: Any, name: str) -> Any:
    """What the forward of a class finds under the name of a global that it reads; None if it does not read it."""
    reads = name in names_read_by(stock_class.forward)
    return inspect.unwrap(stock_class.forward).__globals__.get(name) if reads else None


def copy_of_forward(stock_class: Any, ours: Mapping[str, Any]) -> GlobalsCopy | None:
    """A copy of the class's forward; None if a decorator does not hold the forward where a copy could be put."""
    try:
        return GlobalsCopy(stock_class.forward, ours)
    except ValueError:
        return None


@cache
def names_read_by(forward: Callable[..., Any]) -> set[str]:
    """The names of globals that a forward reads under its decorators; none if it is no Python function."""
    inner = inspect.unwrap(forward)
    return _global_names(inner.__code__) if isinstance(inner, FunctionType) else set()


@cache
def constants_of(forward: Callable[..., Any]) -> set[Any]:
    """The constants in a forward's code, those in its tuples and sets included."""
    inner = inspect.unwrap(forward)
    found = inner.__code__.co_consts if isinstance(inner, FunctionType) else ()
    return {x for value in found for x in (value if isinstance(value, (tuple, frozenset)) else (value,))}


def _global_names(code: CodeType) -> set[str]:
    """The names of globals that a function reads, those of the functions inside of it included."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return names.union(*(_global_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _copied(function: Any, namespace: dict[str, Any]) -> FunctionType:
    """A copy of the undecorated function with other globals, inside of copies of its decorators' wrappers."""
    inner, cells = getattr(function, "__wrapped__", None), getattr(function, "__closure__", None) or ()
    if inner is not None:
        copied = _copied(inner, namespace)
        if not any(cell.cell_contents is inner for cell in cells):
            raise ValueError(f"a decorator of {function.__qualname__} does not hold the function in its closure")
        cells = tuple(CellType(copied) if cell.cell_contents is inner else cell for cell in cells)
        namespace = function.__globals__
    copy = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, cells or None)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
