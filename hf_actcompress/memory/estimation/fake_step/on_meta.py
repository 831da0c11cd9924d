"""Results for further sizes, computed on the meta device, on which fake tensors are built.

torch needs a millisecond to compute what a call returns for fake tensors, and microseconds on the meta device.
Most calls return the same in both, but not all: a CPU's layer norm has its statistics in another dtype. So the first
call of a kind runs in both ways. If the results are the same, calls of that kind with other sizes run on the meta
device.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ....private_apis import FakeTensor

_META = torch.device("meta")
_Found = TypeVar("_Found")


class Results(dict[Hashable, _Found | None], Generic[_Found]):
    """The known results of calls, by arguments; None: the result is not the same for all such arguments.

    Attributes:
        kinds: Kind of call -> whether the meta device returned the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[Hashable, bool] = {}


class NoKind(Exception):
    """The call has an argument whose effect on the result is not known, or that the meta device does not take."""


def kind_of(x: Any) -> Hashable:
    """A value that is equal for arguments which differ only in sizes."""
    kind = type(x)
    if kind is FakeTensor:
        return x.dtype, x.is_contiguous(), tuple(size == 1 for size in x.shape)
    if kind is list or kind is tuple:
        return (kind, *map(kind_of, x))
    if kind is torch.device or isinstance(x, Tensor):
        # a real tensor would take part with its values, and the call would really compute
        raise NoKind
    return (kind, x) if kind in (bool, str, torch.dtype) else (kind,)


def aliases(x: Any, found: list[Tensor]) -> Any:
    """The same arguments on the meta device, as views of the same storages; the new tensors are added to `found`."""
    kind = type(x)
    if kind is FakeTensor:
        alias = torch.empty(0, dtype=x.dtype, device=_META)
        found.append(alias.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride()))
        return found[-1]
    if kind is list or kind is tuple:
        return kind([aliases(part, found) for part in x])
    return {name: aliases(part, found) for name, part in x.items()} if kind is dict else x


def is_plain_meta(x: Any) -> bool:
    """Whether x is a tensor of the meta device, and of no subclass."""
    return type(x) is Tensor and x.device == _META and x.layout is torch.strided and not x.dtype.is_complex
