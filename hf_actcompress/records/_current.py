"""What is active in this thread: the net of a forward, the hooks of its modules, a report that watches."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from ..private_apis import innermost_saved_tensor_hooks

if TYPE_CHECKING:
    from .outside import Hooks


class Netting:
    """Saved-tensor hooks for what stock code saves. Our own ops decide for themselves what they save."""

    hooks: Any
    outside: Hooks | None

    def is_innermost(self) -> bool:
        """Whether no other hooks have been installed since, such as those of a checkpointed region."""
        top = innermost_saved_tensor_hooks()
        return top is not None and top[0] is self.hooks[0]


class Watching(Protocol):
    """A report that asks which module keeps which tensor, where one op runs the code of several modules."""

    def keeps(self, tensors: Sequence[Tensor | None], modules: Sequence[str], *, checkpointed: bool = False) -> None:
        """Announce the tensors that are saved next, and the module for which each is saved.

        Args:
            tensors: All that is saved next.
            modules: The name of each tensor's module, as seen from the module that runs.
            checkpointed: Whether backward will keep more than these for a while.
        """
        ...

    def idle(self) -> AbstractContextManager[None]:
        """A context for a run without gradients, after which another run of the same code keeps what backward needs."""
        ...

    def within(self, module: str) -> AbstractContextManager[None]:
        """A context in which `module`, a submodule of the module that runs, computes."""
        ...


class Hooking(Protocol):
    """The hooks that the modules of a model had when its forward began.

    `may_write`: whether some may write on outputs where autograd does not see it.
    """

    may_write: bool

    def on(self) -> AbstractContextManager[None]:
        """A context in which the modules have these hooks again."""
        ...


class _Current(threading.local):
    def __init__(self) -> None:
        self.net: Netting | None = None
        self.watcher: Watching | None = None
        # patched modules run their stock code, because what they would save is gone when this block ends
        self.stock_only = False
        # the hooks of the modules of the forward in progress; None outside of one
        self.hooks: Hooking | None = None
        # a linear layer whose output nobody reads: only its gradient is used
        self.unread: object = None


current = _Current()


@contextmanager
def stock_only(unread: object = None) -> Iterator[None]:
    """Let patched modules run their stock code: what they save is gone when the block ends.

    Args:
        unread: A linear layer that need not compute its output. Only linear functions follow it, and only the
            gradients of this forward are used, not its values.
    """
    before = current.stock_only, current.unread
    current.stock_only, current.unread = True, unread
    try:
        yield
    finally:
        current.stock_only, current.unread = before
