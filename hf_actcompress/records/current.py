"""What is on in this thread: the net of a forward, and the call of a module that runs again."""

from __future__ import annotations

import threading
from collections.abc import Callable
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


class _Current(threading.local):
    def __init__(self) -> None:
        self.net: Netting | None = None
        self.call: Calling | None = None


current = _Current()
