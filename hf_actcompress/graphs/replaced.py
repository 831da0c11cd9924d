"""Other functions in the place of torch's own while a layer is traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..private_apis.graphs import any_sizes


class Replaced(TorchFunctionMode):
    """While it is on, calls of the functions in a table run those that stand for them there, which may call them."""

    def __init__(self, table: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self._table = table

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._table.get(function, function)(*args, **(kwargs or {}))


def _product(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with any_sizes():
        return function(*args, **kwargs)


# For a trace for any sizes: torch 2.11's own code for these products asks for sizes as numbers. They alone are composed
# in Python, because interpolation, batch norms and LSTMs that are composed there round otherwise than torch's
PRODUCTS: dict[Callable[..., Any], Callable[..., Any]] = {
    function: partial(_product, function)
    for function in (F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__)
}
