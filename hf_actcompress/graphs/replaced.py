"""Other functions in the place of torch's own while a layer is traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.overrides import TorchFunctionMode


class Replaced(TorchFunctionMode):
    """While it is on, calls of the functions in a table run those that stand for them there, which may call them."""

    def __init__(self, table: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self._table = table

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._table.get(function, function)(*args, **(kwargs or {}))
