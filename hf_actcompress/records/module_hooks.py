"""Hooks of modules, as they are when a forward begins. A checkpointed region runs again with the same ones.

Hooks that return other tensors, or write on those that they are handed, decide what can be recomputed. A second run
with more or fewer hooks would save other tensors than the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any
from weakref import WeakSet

from torch import nn

from ..compiling import is_compiling
from ..private_apis import runs_again_in
from ._current import current

# where a module keeps its hooks, and what it notes of them
_PLACES = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
# models in whose last forward hooks might write
_writing: WeakSet[object] = WeakSet()
_Dicts = Sequence[dict[int, Any]]


def places_of(modules: Iterable[nn.Module]) -> _Dicts:
    """Where these modules keep their hooks."""
    return [vars(module)[name] for module in modules for name in _PLACES]


class ModuleHooks:
    """The hooks that a model's modules have now.

    Args:
        places: What `places_of` its modules returned.
        may_write: Whether some may write on outputs where autograd does not see it.
        model: What stands for the model, as long as it lives.
    """

    def __init__(self, places: _Dicts, may_write: bool, model: object) -> None:
        (_writing.add if may_write else _writing.discard)(model)
        self.may_write = may_write
        self._places = places
        self._then = [hooks.copy() for hooks in places] if any(places) else None

    @contextmanager
    def on(self) -> Iterator[None]:
        """A context in which the modules have these hooks, and ops know of them."""
        before, current.hooks = current.hooks, self
        changed = []
        if self._then is not None or any(self._places):
            pairs = zip(self._places, self._then or repeat({}), strict=False)
            changed = [(hooks, then, hooks.copy()) for hooks, then in pairs if hooks != then]
        for hooks, then, _ in changed:
            _fill(hooks, then)
        try:
            yield
        finally:
            current.hooks = before
            for hooks, _, now in changed:
                _fill(hooks, now)


def may_write() -> bool:
    """Whether hooks may write, where autograd does not see it, on what modules are handed or return in this forward.

    A reentrant checkpoint does not say whose layer runs again, so it is told of all models.
    """
    if is_compiling():
        return False
    return bool(_writing) if current.hooks is None else current.hooks.may_write


def region_begins(pack: Any) -> None:
    """Let a checkpointed region run again with the hooks of its first run, which begins. `pack`: its pack hook."""
    if current.hooks is not None:
        runs_again_in(pack, current.hooks.on)


def _fill(hooks: dict[int, Any], others: dict[int, Any]) -> None:
    hooks.clear()
    hooks.update(others)
