"""The second run of a module's own code: what it saves is collected, and linear layers return their first results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ._current import Netting, current
from .held import check_versions
from .outside import Hooks, stands_before
from .saving import own_tensors


class Done(Exception):
    """Ends the second run early, because everything that was asked for has been saved."""


class Replay(Netting):
    """The second run of a module's code: what it saves is collected, and linear layers return their first results."""

    outside: Hooks | None = None

    def __init__(self, given: Sequence[Tensor | None], last: int) -> None:
        self.values: dict[int, Tensor] = {}
        self._given, self._last = iter(given), last
        # whether a linear layer is running
        self._inside = False
        self._versions: list[int] = []
        self.hooks = self._collect, _itself

    def linear(self, x: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """What this layer returned the first time; if that was not kept, it is recomputed."""
        y = next(self._given, None)
        if y is not None:
            return y
        self._inside = True
        try:
            return compute()
        finally:
            self._inside = False

    def pack(self, x: Tensor) -> None:
        """Do nothing: the hooks of this object are the innermost, so `_collect` gets every saved tensor."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """While the block runs, this object is the thread's net and its call in progress."""
        before = current.net, current.call
        stands_before(self, None)
        try:
            with saved_tensors_hooks(*self.hooks):
                current.net, current.call = self, self
                yield
        finally:
            current.net, current.call = before
            # the hooks are methods of this object: they and the object would hold each other
            del self.hooks

    def check(self) -> None:
        """Raise torch's own error if the code has modified in place what it saved."""
        check_versions(tuple(self.values.values()), tuple(self._versions))

    def _collect(self, x: Tensor) -> Tensor:
        if not own_tensors.take(x) and not self._inside:
            self.values[len(self.values)] = x.detach()
            self._versions.append(x._version)
            if len(self.values) > self._last:
                raise Done
        # an alias, because x itself holds the node that saves it
        return x.detach()


def _itself(x: Tensor) -> Tensor:
    return x
