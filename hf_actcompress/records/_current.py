"""What is on in this thread: the net of a forward, and the call of a module that runs again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from .held import Held
    from .outside import Hooks


class Netting(Protocol):
    """Hooks that see what stock code saves, and leave to our own ops what those save."""

    hooks: Any
    outside: Hooks | None

    def is_innermost(self) -> bool:
        """Whether no other hooks have been installed since."""
        ...


class Calling(Protocol):
    """A module's own code, running for the first time or again."""

    def linear(self, x: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """What a linear layer of the module returns for x: computed, or as it was the first time."""
        ...

    def pack(self, x: Tensor) -> Held | None:
        """What is held in place of x, which the module's code saves. None: this call does not know x."""
        ...


class Watching(Protocol):
    """Somebody who wants to know which module keeps what, of code that runs several modules at once."""

    def keeps(self, tensors: Sequence[Tensor | None], modules: Sequence[str], *, checkpointed: bool = False) -> None:
        """What will be saved next, and for which module inside of the one that runs.

        Args:
            tensors: All of it.
            modules: Their names, as seen from the one that runs.
            checkpointed: Whether more is kept for a while, in backward.
        """
        ...

    def idle(self) -> AbstractContextManager[None]:
        """While something runs without gradients of which another run keeps what is needed."""
        ...

    def within(self, module: str) -> AbstractContextManager[None]:
        """While that module inside of the one that runs is at work."""
        ...


class _Current(threading.local):
    def __init__(self) -> None:
        self.net: Netting | None = None
        self.call: Calling | None = None
        self.watcher: Watching | None = None
        # what runs now ends before anything else does: patched modules run their stock code
        self.stock_only = False
        # the module of those whose output nobody reads: only its gradient matters
        self.unread: object = None


current = _Current()


@contextmanager
def stock_only(unread: object = None) -> Iterator[None]:
    """Let patched modules run their stock code: what they save is gone when the block ends.

    Args:
        unread: A linear layer after which there are only linear functions, in a forward of which the gradients matter
            and not the values: it need not compute its output.
    """
    before = current.stock_only, current.unread
    current.stock_only, current.unread = True, unread
    try:
        yield
    finally:
        current.stock_only, current.unread = before
