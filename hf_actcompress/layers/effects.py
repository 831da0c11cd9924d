"""What a traced call does beside its tensors: a change to objects that modules hold, such as a counter or a buffer.

A plan would not repeat it, and a call that is traced and then runs would do it twice. So it is undone, and the layer
runs module by module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from ..graphs.trace import NotTraced
from ..ops.snapshot import Snapshot

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_OTHERS = (nn.Module, Tensor, type, FunctionType, MethodType, ModuleType)
# values that are the same if they are equal
_PLAIN = (bool, int, float, str)


@contextmanager
def no_effects(layer: nn.Module, copies: Snapshot) -> Iterator[None]:
    """While the block runs, nothing may change in the lists, dictionaries and objects that a layer's modules, or the
    copies of them that run, hold.

    Raises:
        NotTraced: Something has. It is as before then.
    """
    held = [*_held_by(layer), *copies.containers()]
    before = [(name, value, state) for name, value in held if (state := _state_of(value)) is not None]
    try:
        yield
    finally:
        changed = [(name, value, state) for name, value, state in before if not _same(_state_of(value), state)]
        for _, value, state in changed:
            _restore(value, state)
    if changed:
        raise NotTraced(f"its code changes what {changed[0][0]} holds")


def _held_by(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """Objects that modules hold as plain attributes, and lists and dictionaries of theirs or of these objects."""
    for path, module in layer.named_modules():
        for name, value in vars(module).items():
            if name not in _OF_EVERY_MODULE:
                place = f"{path}.{name}".lstrip(".")
                yield place, value
                if not isinstance(value, (list, dict)) and (state := _state_of(value)) is not None:
                    yield from ((f"{place}.{key}", x) for key, x in state.items() if isinstance(x, (list, dict)))


def _state_of(value: Any) -> Any:
    """A copy of what may change in an object; None if that is not known."""
    if isinstance(value, (list, dict)):
        return value.copy()
    own = getattr(value, "__dict__", None)
    return dict(own) if isinstance(own, dict) and not isinstance(value, _OTHERS) else None


def _same(now: Any, before: Any) -> bool:
    if isinstance(before, list):
        return len(now) == len(before) and all(map(_is, now, before))
    return now.keys() == before.keys() and all(_is(now[key], value) for key, value in before.items())


def _is(now: Any, before: Any) -> bool:
    return now is before or (isinstance(before, _PLAIN) and type(now) is type(before) and now == before)


def _restore(value: Any, state: Any) -> None:
    if isinstance(value, list):
        value[:] = state
        return
    own = value if isinstance(value, dict) else vars(value)
    own.clear()
    own.update(state)
