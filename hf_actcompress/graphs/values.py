"""What a module's code reads in tensors while it is traced.

Of small integer tensors and masks these are numbers: where each picture of a batch begins, the stride of a convolution
that is a buffer, or which tokens attend to all others. A graph holds for these numbers alone. Of what the code computes
these are checks, such as whether all of it is finite. A graph holds if each check turns out as it was assumed, and
returns them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import SymInt, Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..private_apis import FakeTensor, without_dispatch_modes

# tensors with more elements are read by no code of a layer; each call would have to compare them
_MOST = 65536
_READ = frozenset({torch.int64, torch.int32, torch.bool})
aten = torch.ops.aten
# what a check is assumed to find: that all numbers are as they should be, and that none is as it should not be
_ASSUMED = {aten.all.default: True, aten.any.default: False}

# id of a tensor -> the tensor, its version, its numbers; an entry ends with the tensor
_known: dict[int, tuple[weakref.ref[Tensor], int, bytes]] = {}


def may_be_read(x: Tensor) -> bool:
    """Whether a graph may depend on the numbers in x."""
    return x.dtype in _READ and x.numel() <= _MOST and not (isinstance(x, FakeTensor) or x.is_meta)


def numbers_in(x: Tensor) -> bytes:
    """The numbers in a tensor. They are read from its device once for all layers that are given the tensor."""
    if x.is_inference():
        return _bytes(x)
    key = id(x)
    found = _known.get(key)
    if found is None or found[0]() is not x or found[1] != x._version:
        _known[key] = found = weakref.ref(x, lambda _: _known.pop(key, None)), x._version, _bytes(x)
    return found[2]


def _memory(x: Tensor) -> int:
    place: int = x.untyped_storage()._cdata
    return place


def _bytes(x: Tensor) -> bytes:
    found: bytes = x.detach().cpu().numpy().tobytes()
    return found


class _Made(NamedTuple):
    """How a known tensor is made.

    Attributes:
        x: The one without data, which stays alive.
        real: Makes the one with data.
        of_mask: Whether it follows from a mask.
    """

    x: Tensor
    real: Callable[[], Any]
    of_mask: bool


class Reading(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, code that asks a tensor without data for a number gets it, if it follows from known tensors. So
    do operations whose results have as many elements as the numbers say: which elements are not zero. A check of other
    tensors, or of a mask, gets what it is assumed to find.

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
        # by the id of a tensor without data
        self._made: dict[int, _Made] = {}
        for place, (x, real) in given.items():
            self._made[id(x)] = _Made(x, self._giver(place, real), real.dtype == torch.bool)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        # with places for masks, how many elements it gives is known
        indexes = func is aten.index.Tensor
        if indexes:
            args = args[0], self._places(args[1])
        flat, form = pytree.tree_flatten((args, kwargs or {}))
        known = self._known(func, flat)
        if func is aten._local_scalar_dense.default:
            if id(args[0]) in self._assumed:
                self.checks.append(self._assumed[id(args[0])])
                return self.checks[-1][1]
            if known:
                return self._compute(func, flat, form)
        if known and torch.Tag.dynamic_output_shape in func.tags and not indexes:
            return self._constant(self._compute(func, flat, form))
        out = func(*args, **(kwargs or {}))
        of_mask = any(id(x) in self._made and self._made[id(x)].of_mask for x in flat)
        if func in _ASSUMED and (of_mask or not known):
            self._assumed[id(out)] = out, _ASSUMED[func]
        if known:
            self._note(out, lambda: self._compute(func, flat, form), of_mask)
        return out

    def _places(self, indices: list[Tensor | None]) -> list[Tensor | None]:
        """Indices where a known mask is the places of its elements, as torch itself makes them."""
        found: list[Tensor | None] = []
        for x in indices:
            known = x is not None and x.dtype == torch.bool and id(x) in self._made
            flat, form = pytree.tree_flatten(((x,), {}))
            found += self._constant(self._compute(aten.nonzero_numpy.default, flat, form)) if known else [x]
        return found

    def _constant(self, found: Any) -> Any:
        """Results with data, which are a part of the graph."""
        for x in pytree.tree_leaves(found):
            if isinstance(x, Tensor):
                self._made[id(x)] = _Made(x, lambda x=x: x, False)  # type: ignore[misc]
        return found

    def _known(self, func: Any, flat: list[Any]) -> bool:
        """Whether a result follows from known tensors. One that is written on, by any name, is known no longer."""
        if func._schema.is_mutable:
            written = {_memory(x) for x in flat if isinstance(x, Tensor)}
            self._made = {key: made for key, made in self._made.items() if _memory(made.x) not in written}
            return False
        if torch.Tag.nondeterministic_seeded in func.tags:
            return False
        return all(id(x) in self._made if isinstance(x, Tensor) else not isinstance(x, SymInt) for x in flat)

    def _note(self, out: Any, compute: Callable[[], Any], of_mask: bool) -> None:
        results: list[Any] = []

        def result(i: int) -> Any:
            if not results:
                results.extend(pytree.tree_leaves(compute()))
            return results[i]

        for i, x in enumerate(pytree.tree_leaves(out)):
            if isinstance(x, Tensor):
                self._made[id(x)] = _Made(x, lambda i=i: result(i), of_mask)  # type: ignore[misc]

    def _compute(self, func: Any, flat: list[Any], form: Any) -> Any:
        real = [self._made[id(x)].real() if isinstance(x, Tensor) else x for x in flat]
        args, kwargs = pytree.tree_unflatten(real, form)
        with without_dispatch_modes():
            return func(*args, **kwargs)

    def _giver(self, place: int, real: Tensor) -> Callable[[], Tensor]:
        def give() -> Tensor:
            self.read.add(place)
            return real

        return give
