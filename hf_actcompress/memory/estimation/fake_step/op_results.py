"""What ops return for fake tensors of given shapes, computed once and then remembered.

torch computes the result of each call anew, or looks it up under a key that is slow to make; this took most of the time
of a step on fake tensors. A step has few ops, and calls each with the same shapes for every layer and every strategy.
So the first call goes to torch, and its result is noted by shape, stride, dtype and storage. A later call with such
arguments makes new tensors of that kind.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....private_apis import (
    FakeTensor,
    FakeTensorMode,
    active_fake_mode,
    fake_tensor,
    unset_fake_temporarily,
    without_torch_dispatch,
    without_torch_function_modes,
)
from .on_meta import NoKind, Results, aliases, is_plain_meta, kind_of

_CPU, _META = torch.device("cpu"), torch.device("meta")
# our kernels' results are made by it: its arguments say all about the tensor that it returns
_EMPTY = torch.ops.aten.empty_strided.default
# stands for the result of a call that is not known yet
_NEW: Any = object()
PLAIN = frozenset(
    (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
)


@dataclass(frozen=True, slots=True)
class MadeTensor:
    """Describes a tensor that an op or a kernel returns.

    Args:
        shape, stride, offset, dtype: The tensor's own.
        of: Index of the tensor argument whose storage it shares; None: it has its own storage.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    of: int | None

    @property
    def nbytes(self) -> int:
        """Bytes of the smallest storage that holds it."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return 0 if 0 in self.shape else (last + 1) * self.dtype.itemsize

    def empty(self, device: torch.device = _CPU) -> Tensor:
        """Make such a tensor with its own storage."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def tensor(self, arguments: Sequence[Any]) -> Tensor:
        """Make such a tensor on the meta device."""
        if self.of is None:
            return self.empty(_META)
        storage = arguments[self.of].untyped_storage()
        return torch.empty(0, dtype=self.dtype, device=_META).set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class _Same:
    """The op returns its tensor argument of this index itself."""

    number: int


# a plain value or None stands for itself
Leaf = MadeTensor | _Same | Any


@dataclass(frozen=True, slots=True)
class _Result:
    """What an op returns: one leaf, or a tuple or list of leaves."""

    leaves: tuple[Leaf, ...]
    several: type | None


class OpResults(Results[_Result]):
    """(op, arguments) -> its result."""


class OpCalls:
    """Calls ops in one step, and adds their results to those that are known."""

    def __init__(self, known: OpResults) -> None:
        self._known = known
        # an empty fake tensor of the mode of the latest call
        self._template: Any = None

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``func(*args, **kwargs)``, called inside a dispatch."""
        arguments: list[Any] = []
        with without_torch_function_modes():
            key = _key(func, args, kwargs, arguments)
            mode = arguments[0].fake_mode if arguments else active_fake_mode()
            if mode is None:
                # the arguments include real tensors
                key = None
            # the hash of a key takes long, so that a known result is looked up with one
            found = self._known.get(key, _NEW) if key is not None else None
            kind = None
            if found is _NEW:
                kind, found = _kind(func, args, kwargs, arguments), None
                if func is _EMPTY and kwargs.get("dtype") is not None and kwargs.get("device") in (None, _CPU):
                    made = MadeTensor(tuple(args[0]), tuple(args[1]), 0, kwargs["dtype"], None)
                    found = self._known[key] = _Result((made,), None)
                elif self._known.kinds.get(kind):
                    found = self._known[key] = _on_meta(func, args, kwargs)
            if found is not None and mode is not None:
                return self._made(found, arguments, mode)
            before = storages_in(arguments)
        result = func(*args, **kwargs)
        if key is not None and key not in self._known:
            with without_torch_function_modes():
                # the result is not noted if the op gave an argument another shape or other memory
                same = storages_in(arguments) == before and _key(func, args, kwargs, []) == key
                found = self._known[key] = _described(result, arguments, before) if same else None
                if kind is not None and kind not in self._known.kinds:
                    self._known.kinds[kind] = found is not None and _on_meta(func, args, kwargs) == found
        return result

    def _made(self, result: _Result, arguments: Sequence[Any], mode: FakeTensorMode) -> Any:
        with without_torch_dispatch():
            found = [self._leaf(leaf, arguments, mode) for leaf in result.leaves]
        return found[0] if result.several is None else result.several(found)

    def _leaf(self, leaf: Leaf, arguments: Sequence[Any], mode: FakeTensorMode) -> Any:
        if type(leaf) is _Same:
            return arguments[leaf.number]
        if type(leaf) is not MadeTensor:
            return leaf
        if self._template is None or self._template.fake_mode is not mode:
            self._template = FakeTensor(mode, torch.empty(0, device=_META), _CPU)
        return fake_tensor(leaf.tensor(arguments), self._template)


def _key(func: Any, args: Any, kwargs: Any, arguments: list[Any]) -> Hashable:
    """A value that decides the sizes of the result; None if unknown. The fake tensors are appended to `arguments`."""
    try:
        return func, _part(args, arguments), _part(tuple(kwargs.items()), arguments) if kwargs else None
    except NoKind:
        return None


def _part(x: Any, arguments: list[Any]) -> Hashable:
    kind = type(x)
    if kind is FakeTensor:
        if not _is_plain(x):
            raise NoKind
        arguments.append(x)
        return x.shape, x.stride(), x.storage_offset(), x.dtype
    if kind in PLAIN:
        return kind, x
    if kind is list or kind is tuple:
        return (kind, *[_part(part, arguments) for part in x])
    raise NoKind


def _is_plain(x: Any) -> bool:
    return (
        type(x) is FakeTensor
        and x.constant is None
        and x.layout is torch.strided
        and x.fake_device == _CPU
        and not x.dtype.is_complex
    )


def storages_in(arguments: Sequence[Any]) -> list[tuple[int, int]]:
    return [(storage._cdata, storage.nbytes()) for storage in (x.untyped_storage() for x in arguments)]


def _kind(func: Any, args: Any, kwargs: Any, arguments: Sequence[Any]) -> Hashable | None:
    """A value that is equal for calls which differ in sizes only; None for a call without tensors, which would make
    real ones, and for higher-order ops.
    """
    if not arguments or getattr(func, "_schema", None) is None:
        return None
    try:
        return func, kind_of(args), kind_of(tuple(kwargs.items()))
    except NoKind:
        return None


def _on_meta(func: Any, args: Any, kwargs: Any) -> _Result | None:
    """The result that the call has on the meta device; None if it gives an argument another shape or other memory."""
    over: list[Tensor] = []
    with unset_fake_temporarily(), suppress(Exception):
        args, kwargs = aliases(args, over), aliases(kwargs, over)
        before, shapes = storages_in(over), [(x.shape, x.stride()) for x in over]
        result = func(*args, **kwargs)
        if storages_in(over) == before and [(x.shape, x.stride()) for x in over] == shapes:
            return _described(result, over, before, is_plain_meta)
    return None


def _described(
    result: Any,
    arguments: Sequence[Any],
    storages: Sequence[tuple[int, int]],
    is_plain: Callable[[Any], bool] = _is_plain,
) -> _Result | None:
    several = type(result) if type(result) in (tuple, list) else None
    leaves = described((result,) if several is None else result, arguments, storages, is_plain)
    return None if leaves is None else _Result(leaves, several)


def described(
    results: Sequence[Any],
    arguments: Sequence[Any],
    storages: Sequence[tuple[int, int]],
    is_plain: Callable[[Any], bool],
) -> tuple[Leaf, ...] | None:
    """Describe what a call returned; None if it has a subclass of tensor, or shares storage in another way than a view
    does.

    Args:
        results: The tensors and plain values.
        arguments, storages: The call's tensors, and their storages before the call.
        is_plain: Whether a tensor can be made from its description.
    """
    owners = {key: index for index, (key, _) in reversed(list(enumerate(storages)))}
    leaves: list[Leaf] = []
    fresh: set[int] = set()
    for x in results:
        position = next((index for index, argument in enumerate(arguments) if argument is x), None)
        if position is not None or type(x) in PLAIN:
            leaves.append(x if position is None else _Same(position))
            continue
        if not is_plain(x) or x.requires_grad:
            return None
        storage = x.untyped_storage()
        made = MadeTensor(tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, owners.get(storage._cdata))
        if made.of is None:
            if made.offset or storage.nbytes() != made.nbytes or storage._cdata in fresh:
                return None
            fresh.add(storage._cdata)
        leaves.append(made)
    return tuple(leaves)
