"""Side effects of a layer's code on attributes of modules, such as a counter, and on what these hold.

A plan would not repeat them, and a call that is traced and then runs module by module would have them twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from ..graphs.trace import NotTraced

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_WITHOUT_STATE = (nn.Module, Tensor, type, FunctionType, MethodType, ModuleType)
# values that are the same if they are equal
_PLAIN = (bool, int, float, str)


def without_effects(copy: nn.Module, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run the code of a layer's copy, which may share objects with the layer.

    Raises:
        NotTraced: The code has changed an attribute of a module, or an object, a list or a dictionary that one holds.
            What the layer shares is as before then.
    """
    before = list(_states(copy))
    try:
        value = run(*args, **kwargs)
    finally:
        changed = [(place, holder, state) for place, holder, state in before if not _same(_own(holder), state)]
        for _, holder, state in changed:
            _restore(holder, state)
    if changed:
        raise NotTraced(f"its code changes {changed[0][0]}")
    return value


def _states(copy: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """What may change, each with its place and a copy of its state: modules, what they hold, and what that holds."""
    for path, module in copy.named_modules():
        yield path or "an attribute of the layer", module, _own(module).copy()
        for name, value in vars(module).items():
            if name not in _OF_EVERY_MODULE:
                yield from _states_in(f"{path}.{name}".lstrip("."), value, deep=True)


def _states_in(place: str, value: Any, deep: bool) -> Iterator[tuple[str, Any, Any]]:
    own = _own(value)
    if own is not None:
        yield place, value, own.copy()
        # of an object also its lists and dictionaries, of a list nothing more
        for name, inner in own.items() if deep and own is not value else ():
            if isinstance(inner, (list, dict)):
                yield from _states_in(f"{place}.{name}", inner, deep=False)


def _own(holder: Any) -> Any:
    """The list or dictionary of what an object holds; None if it holds nothing that could change."""
    if isinstance(holder, (list, dict)):
        return holder
    if isinstance(holder, nn.Module):
        return {name: value for name, value in vars(holder).items() if name not in _OF_EVERY_MODULE}
    own = getattr(holder, "__dict__", None)
    return own if isinstance(own, dict) and not isinstance(holder, _WITHOUT_STATE) else None


def _same(now: Any, before: Any) -> bool:
    if isinstance(before, list):
        return len(now) == len(before) and all(map(_is, now, before))
    return now.keys() == before.keys() and all(_is(now[key], value) for key, value in before.items())


def _is(now: Any, before: Any) -> bool:
    return now is before or (isinstance(before, _PLAIN) and type(now) is type(before) and now == before)


def _restore(holder: Any, state: Any) -> None:
    # a module is a copy, and goes
    if not isinstance(holder, nn.Module):
        own = _own(holder)
        own.clear()
        own.extend(state) if isinstance(own, list) else own.update(state)
