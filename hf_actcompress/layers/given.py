"""What a call of a layer is given and returns, taken apart into tensors and a form, and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..models.arguments import is_cache, is_shared_dict
from ..modules.base import PLAIN_TENSORS
from ..ops import PackedMask

_CONSTANTS = frozenset({bool, float, str, type(None), torch.dtype, torch.device, torch.Size})


class Unknown(Exception):
    """An argument that no plan takes."""


def first_activation(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The first tensor with floating-point numbers among the arguments of a call."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor) and x.is_floating_point():
            return x
    return None


class CallArguments:
    """The arguments of one call.

    Attributes:
        tensors: The tensors among them, in order.
        form: What else a plan depends on: where the tensors are, and all constants. Equal for calls that one plan may
            serve.
        integers: The integers among them. A layer's code may not look at them, as at the number of items in a batch.
        caches: The caches and dictionaries among them, into which a layer may write.
        masks: The masks without memory among them.
    """

    __slots__ = ("args", "caches", "form", "integers", "kwargs", "masks", "tensors")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.tensors: list[Tensor] = []
        self.caches: list[Any] = []
        self.integers: list[int] = []
        self.masks: list[PackedMask] = []
        take, values = self._take, [*args, *kwargs.values()]
        self.form = (len(args), *kwargs, *[value if type(value) in _CONSTANTS else take(value) for value in values])

    def _take(self, value: Any) -> Any:
        kind = type(value)
        if kind in _CONSTANTS:
            return value
        if kind in PLAIN_TENSORS:
            self.tensors.append(value)
            return Tensor
        if kind is int:
            self.integers.append(value)
            return int
        if kind is tuple or kind is list:
            return (kind, *map(self._take, value))
        if is_cache(value):
            self.caches.append(value)
            return kind
        if is_shared_dict(value):
            self.caches.append(value)
            return (kind, *((key, self._take(item)) for key, item in value.items()))
        if kind is PackedMask and value.dtype == torch.bool:
            # that of eager attention, in numbers, is read by the layer's own code
            self.masks.append(value)
            return kind
        raise Unknown(f"it is called with a {kind.__name__}")

    def with_others(
        self, tensors: Sequence[Tensor], caches: Sequence[Any], integers: Sequence[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other tensors, caches and integers in the same places."""
        rest, others, numbers = iter(tensors), iter(caches), iter(integers)

        def put(value: Any) -> Any:
            kind = type(value)
            if kind in PLAIN_TENSORS:
                return next(rest)
            if kind is tuple or kind is list:
                return kind(map(put, value))
            if kind is int:
                return next(numbers)
            if is_shared_dict(value):
                other = next(others)
                other.update({key: put(item) for key, item in value.items()})
                return other
            # a mask without memory is handed to attention as it is
            return next(others) if is_cache(value) else value

        return tuple(map(put, self.args)), {name: put(value) for name, value in self.kwargs.items()}


class Returned:
    """The form of what a layer returns.

    Args:
        value: What it returned when it was traced.
        given: The tensors and caches that it was given then, which it may hand on.

    Attributes:
        tensors: The tensors that it has computed.
    """

    def __init__(self, value: Any, given: Sequence[Any]) -> None:
        leaves, self._tree = pytree.tree_flatten(value)
        places = {id(x): i for i, x in enumerate(given)}
        self.tensors: list[Tensor] = []
        # for each leaf: ("made", place among the tensors), ("given", place), or ("constant", value)
        self._leaves: list[tuple[str, Any]] = []
        for leaf in leaves:
            if id(leaf) in places:
                self._leaves.append(("given", places[id(leaf)]))
            elif isinstance(leaf, Tensor):
                self._leaves.append(("made", len(self.tensors)))
                self.tensors.append(leaf)
            elif type(leaf) in _CONSTANTS or type(leaf) is int:
                self._leaves.append(("constant", leaf))
            else:
                raise Unknown(f"it returns a {type(leaf).__name__}")
        self._alone = self._tree.is_leaf() and self._leaves == [("made", 0)]

    def forget(self) -> None:
        """Drop the tensors of the trace."""
        self.tensors = []

    def put_together(self, made: Sequence[Tensor], given: Sequence[Any]) -> Any:
        """What the layer returns in a call."""
        if self._alone:
            return made[0]
        sources = {"made": made, "given": given}
        leaves = [value if how == "constant" else sources[how][value] for how, value in self._leaves]
        return pytree.tree_unflatten(leaves, self._tree)
