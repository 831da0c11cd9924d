"""What a module's code reads in tensors while it is traced.

Of small integer tensors these are numbers: where each picture of a batch begins, or the stride of a convolution that is
a buffer. A graph holds for these numbers alone. Of what the code computes these are checks, such as whether all of it
is finite. A graph holds if each check turns out as it was assumed, and returns them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..private_apis import FakeTensor, without_dispatch_modes

# tensors with more elements are read by no code of a layer; each call would have to compare them
_MOST = 4096
_INTEGERS = frozenset({torch.int64, torch.int32})
aten = torch.ops.aten
# what a check is assumed to find: that all numbers are as they should be, and that none is as it should not be
_ASSUMED = {aten.all.default: True, aten.any.default: False}

# id of a tensor -> the tensor, its version, its numbers; an entry ends with the tensor
_known: dict[int, tuple[weakref.ref[Tensor], int, tuple[Any, ...]]] = {}


def may_be_read(x: Tensor) -> bool:
    """Whether a graph may depend on the numbers in x."""
    return x.dtype in _INTEGERS and x.numel() <= _MOST and not (isinstance(x, FakeTensor) or x.is_meta)


def numbers_in(x: Tensor) -> tuple[Any, ...]:
    """The numbers in an integer tensor. They are read from its device once for all layers that are given the tensor."""
    if x.is_inference():
        return tuple(x.flatten().tolist())
    key = id(x)
    found = _known.get(key)
    if found is None or found[0]() is not x or found[1] != x._version:
        numbers = tuple(x.flatten().tolist())
        _known[key] = found = weakref.ref(x, lambda _: _known.pop(key, None)), x._version, numbers
    return found[2]


class Reading(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, code that asks a tensor without data for a number gets it, if it follows from known tensors. A
    check of others gets what it is assumed to find.

    Args:
        given: Tensors without data, and for each the same tensor with data.

    Attributes:
        read: Those whose numbers were read, by place in `given`.
        checks: The checks of others, without data, and what each is assumed to find.
    """

    def __init__(self, given: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read: set[int] = set()
        self.checks: list[tuple[Tensor, bool]] = []
        # by the id of a tensor without data: that tensor, which stays alive, and what it is assumed to be
        self._assumed: dict[int, tuple[Tensor, bool]] = {}
        # by the id of a tensor without data: that tensor, which stays alive, and what makes the one with data
        self._made: dict[int, tuple[Tensor, Callable[[], Any]]] = {}
        for place, (x, real) in given.items():
            self._made[id(x)] = x, self._giver(place, real)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        flat, form = pytree.tree_flatten((args, kwargs or {}))
        known = self._known(func, flat)
        if func is aten._local_scalar_dense.default:
            if known:
                return self._compute(func, flat, form)
            if id(args[0]) in self._assumed:
                self.checks.append(self._assumed[id(args[0])])
                return self.checks[-1][1]
        out = func(*args, **(kwargs or {}))
        if func in _ASSUMED:
            self._assumed[id(out)] = out, _ASSUMED[func]
        if known:
            self._note(out, lambda: self._compute(func, flat, form))
        return out

    def _known(self, func: Any, flat: list[Any]) -> bool:
        """Whether a result follows from known tensors. One that is written on is known no longer."""
        if func._schema.is_mutable:
            for x in flat:
                self._made.pop(id(x), None)
            return False
        if torch.Tag.nondeterministic_seeded in func.tags:
            return False
        return all(id(x) in self._made if isinstance(x, Tensor) else not isinstance(x, SymInt) for x in flat)

    def _note(self, out: Any, compute: Callable[[], Any]) -> None:
        results: list[Any] = []

        def result(i: int) -> Any:
            if not results:
                results.extend(pytree.tree_leaves(compute()))
            return results[i]

        for i, x in enumerate(pytree.tree_leaves(out)):
            if isinstance(x, Tensor):
                self._made[id(x)] = x, lambda i=i: result(i)  # type: ignore[misc]

    def _compute(self, func: Any, flat: list[Any], form: Any) -> Any:
        real = [self._made[id(x)][1]() if isinstance(x, Tensor) else x for x in flat]
        args, kwargs = pytree.tree_unflatten(real, form)
        with without_dispatch_modes():
            return func(*args, **kwargs)

    def _giver(self, place: int, real: Tensor) -> Callable[[], Tensor]:
        def give() -> Tensor:
            self.read.add(place)
            return real

        return give
