"""Runs the functions of `reference` as a CUDA device does: each as one kernel, which allocates only its results.

The shapes of the arguments decide what a kernel allocates. A reference function works in chunks, with hundreds of ops.
So it runs once per set of shapes; later calls get new, empty results of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ....compilation import is_traced_plan
from ....kernels import KERNELS, TIMED
from ....private_apis import FakeTensor, without_dispatch_modes
from ....reference.logits_chunks import chunk_sizes, row_sizes
from ....reference.table import FUNCTIONS
from .fake_allocator import FakeAllocator
from .on_meta import NoKind, Results, aliases, is_plain_meta, kind_of
from .op_results import PLAIN, Leaf, MadeTensor, described, storages_in

# function -> bytes that its kernel takes while it runs, beside the results, computed from its arguments
_WORKING: dict[str, Callable[..., Sequence[int]]] = {
    "linear_cross_entropy_fwd": lambda h, weight, bias, target, *rest: row_sizes(h, weight, *rest),
    "linear_cross_entropy_bwd": lambda dlosses, h, weight, bias, target, maximum, log_sum, *rest: chunk_sizes(
        h, weight, *rest
    ),
}


@dataclass(frozen=True)
class Result:
    """What a function returned: plain values as they are, and a description in place of each tensor."""

    leaves: tuple[Leaf, ...]
    form: TreeSpec

    def made(self) -> Any:
        return tree_unflatten([x.empty() if isinstance(x, MadeTensor) else x for x in self.leaves], self.form)


class KernelResults(Results[Result]):
    """(name, arguments) -> the result; None if it has to be computed in each call."""


class Kernels:
    """The functions of `reference` for a step on fake tensors. The allocator counts their results and no temporary
    tensors, and `known` gets new results.
    """

    def __init__(self, allocator: FakeAllocator, known: KernelResults) -> None:
        self._allocator, self._known = allocator, known

    def function(self, name: str) -> Callable[..., Any]:
        """The function of that name; where the device runs it as one kernel, it is counted as one."""
        function = FUNCTIONS[name]
        if name not in KERNELS or name in TIMED:
            return function

        @wraps(function)
        def kernel(*args: Any, **kwargs: Any) -> Any:
            # a layer that is traced is no part of the step, and may have symbols for sizes
            return function(*args, **kwargs) if is_traced_plan() else self._run(name, function, args, kwargs)

        return kernel

    def _run(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        key, known = _key(name, args, kwargs), self._known
        kind = None
        if key is not None and key not in known:
            kind = _kind(name, args, kwargs)
            if known.kinds.get(kind):
                known[key] = self._on_meta(function, args, kwargs)
        result = known.get(key) if key is not None else None
        with self._allocator.results_only():
            made = function(*args, **kwargs) if result is None else result.made()
        if name in _WORKING:
            self._allocator.works_in(*_WORKING[name](*args, **kwargs))
        if key is not None and key not in known:
            found = known[key] = self._described(made, (args, kwargs))
            if kind is not None and kind not in known.kinds:
                known.kinds[kind] = found is not None and self._on_meta(function, args, kwargs) == found
        return made

    def _on_meta(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Result | None:
        with self._allocator.results_only(note=False):
            return _on_meta(function, args, kwargs)

    def _described(self, made: Any, arguments: Any) -> Result | None:
        """Describe the results; None if one shares memory with another tensor, or has another size on the device."""

        def counted(x: Tensor) -> bool:
            if type(x) is not FakeTensor:
                return False
            storage = x.untyped_storage()
            return self._allocator.size_of(storage) == self._allocator.rounded(storage.nbytes())

        return _described(made, arguments, counted)


def _described(made: Any, arguments: Any, is_plain: Callable[[Tensor], bool]) -> Result | None:
    leaves, form = tree_flatten(made)
    given = storages_in([x for x in tree_leaves(arguments) if isinstance(x, Tensor)])
    found = described(leaves, (), given, is_plain)
    if found is None or any(isinstance(x, MadeTensor) and x.of is not None for x in found):
        return None
    return Result(found, form)


def _kind(name: str, args: Any, kwargs: Any) -> Hashable | None:
    """A value that is equal for calls which differ only in sizes."""
    try:
        return name, torch.is_autocast_enabled("cpu"), kind_of(args), kind_of(tuple(sorted(kwargs.items())))
    except NoKind:
        return None


def _on_meta(function: Callable[..., Any], args: Any, kwargs: Any) -> Result | None:
    """The result that the call has on the meta device."""
    over: list[Tensor] = []
    with without_dispatch_modes(), suppress(Exception):
        made = function(*aliases(args, over), **aliases(kwargs, over))
        return _described(made, over, is_plain_meta)
    return None


def _key(name: str, args: Any, kwargs: Any) -> Hashable:
    """A value that decides the sizes of the results; None if other things may decide them, too."""
    leaves, form = tree_flatten((args, kwargs))
    parts: list[Any] = [name, form, torch.is_autocast_enabled("cpu")]
    for x in leaves:
        if isinstance(x, Tensor):
            if x.requires_grad and torch.is_grad_enabled():
                return None
            parts.append((type(x), x.shape, x.stride(), x.dtype))
        elif type(x) in PLAIN:
            parts.append((type(x), x))
        elif callable(x):
            # a function of a chunk's elements does not change any size
            parts.append(Callable)
        else:
            return None
    return tuple(parts)
