"""What ops make of fake tensors of certain shapes, found out once.

Torch works out the result of each call anew, or looks for it under a key that is slow to make: that was most of the time
of a step on fake tensors. The ops of a step are few, and each is called with the same shapes for every layer and for
every strategy. So the first call goes to torch, and its result is noted by shape, stride, dtype and storage. A further
call with such arguments makes tensors of that kind.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...private_apis import FakeTensor, unset_fake_temporarily

aten = torch.ops.aten

_CPU = torch.device("cpu")
_META = torch.device("meta")
_PLAIN = frozenset(
    (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
)


class _NotPlain(Exception):
    """An argument whose effect on the result is not known."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor that an op returns.

    Args:
        shape, stride, offset, dtype: Of it.
        of: The tensor argument whose storage it has; None: one of its own.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    of: int | None

    @property
    def nbytes(self) -> int:
        """Of the smallest storage that holds it."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return 0 if 0 in self.shape else (last + 1) * self.dtype.itemsize

    def tensor(self, arguments: Sequence[Any]) -> Tensor:
        """Such a tensor of the arguments' mode. Call it where that mode is off."""
        if self.of is None:
            made = aten.empty_strided.default(self.shape, self.stride, dtype=self.dtype, device=_META)
        else:
            storage = arguments[self.of].untyped_storage()
            made = aten.empty.memory_format((0,), dtype=self.dtype, device=_META)
            made = aten.set_.source_Storage_storage_offset(made, storage, self.offset, self.shape, self.stride)
        return FakeTensor(arguments[0].fake_mode, made, _CPU)


# a tensor; the number of the tensor argument that is returned as it is; or None
_Leaf = _Made | int | None


@dataclass(frozen=True, slots=True)
class _Result:
    leaves: tuple[_Leaf, ...]
    several: type | None

    def made(self, arguments: Sequence[Any]) -> Any:
        with unset_fake_temporarily():
            found = [
                leaf if leaf is None else arguments[leaf] if type(leaf) is int else leaf.tensor(arguments)  # type: ignore[union-attr]
                for leaf in self.leaves
            ]
        return found[0] if self.several is None else self.several(found)


# (op, arguments) -> its result; None: it is not the same for all such arguments
OpResults = dict[Hashable, _Result | None]


def result_of(func: Any, args: Any, kwargs: Any, known: OpResults) -> Any:
    """``func(*args, **kwargs)`` of an op, through what is known of it. Call it inside of a dispatch."""
    arguments: list[Any] = []
    try:
        key = _key(func, args, kwargs, arguments)
    except _NotPlain:
        return func(*args, **kwargs)
    if not arguments:
        # its mode is not known
        return func(*args, **kwargs)
    if key in known:
        found = known[key]
        return func(*args, **kwargs) if found is None else found.made(arguments)
    storages = _storages(arguments)
    result = func(*args, **kwargs)
    # not of an op that gives an argument another shape or memory
    same = _storages(arguments) == storages and _key(func, args, kwargs, []) == key
    known[key] = _described(result, arguments, storages) if same else None
    return result


def _key(func: Any, args: Any, kwargs: Any, arguments: list[Any]) -> Hashable:
    return func, _part(args, arguments), _part(tuple(kwargs.items()), arguments) if kwargs else None


def _storages(arguments: Sequence[Any]) -> list[tuple[int, int]]:
    return [(storage._cdata, storage.nbytes()) for storage in (x.untyped_storage() for x in arguments)]


def _part(x: Any, arguments: list[Any]) -> Hashable:
    """What of an argument decides the result's sizes; its fake tensors are added to `arguments`."""
    kind = type(x)
    if kind is FakeTensor:
        if not _is_plain(x):
            raise _NotPlain
        arguments.append(x)
        return x.shape, x.stride(), x.storage_offset(), x.dtype
    if kind in _PLAIN:
        return kind, x
    if kind is list or kind is tuple:
        return (kind, *[_part(part, arguments) for part in x])
    raise _NotPlain


def _described(result: Any, arguments: Sequence[Any], storages: Sequence[tuple[int, int]]) -> _Result | None:
    """None for what is no tensor of torch's plain kind, or shares a storage in another way than a view does."""
    several = type(result) if type(result) in (tuple, list) else None
    owners = {key: index for index, (key, _) in reversed(list(enumerate(storages)))}
    leaves: list[_Leaf] = []
    fresh: set[int] = set()
    for x in (result,) if several is None else result:
        position = next((index for index, argument in enumerate(arguments) if argument is x), None)
        if x is None or position is not None:
            leaves.append(position)
            continue
        if not _is_plain(x) or x.requires_grad:
            return None
        storage = x.untyped_storage()
        made = _Made(tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, owners.get(storage._cdata))
        if made.of is None:
            if made.offset or storage.nbytes() != made.nbytes or storage._cdata in fresh:
                return None
            fresh.add(storage._cdata)
        leaves.append(made)
    return _Result(tuple(leaves), several)


def _is_plain(x: Any) -> bool:
    return (
        type(x) is FakeTensor
        and x.constant is None
        and x.layout is torch.strided
        and x.fake_device == _CPU
        and not x.dtype.is_complex
    )
