"""Results for further sizes, from tensors of the meta device, which a fake tensor stands on.

To find out what a call makes of fake tensors takes torch a millisecond, on the meta device some microseconds. Mostly
both say the same, but not always: a CPU's layer norm has its statistics in another dtype. So the first call of a kind
is asked both ways, and where the answers are one, further calls of that kind, with other sizes, go to the meta device.
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
    """What calls are known to make, by their arguments; None: it is not the same for all such arguments.

    Attributes:
        kinds: Kind of call -> whether the meta device says the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[Hashable, bool] = {}


class NoKind(Exception):
    """An argument that a call on the meta device cannot be given."""


def kind_of(x: Any) -> Hashable:
    """What arguments of other sizes have in common with these."""
    kind = type(x)
    if kind is FakeTensor:
        return x.dtype, x.is_contiguous(), tuple(size == 1 for size in x.shape)
    if kind is list or kind is tuple:
        return (kind, *map(kind_of, x))
    if kind is torch.device or isinstance(x, Tensor):
        # other tensors would be worked with as they are, with all their values
        raise NoKind
    return (kind, x) if kind in (bool, str, torch.dtype) else (kind,)


def aliases(x: Any, found: list[Tensor]) -> Any:
    """The same arguments with tensors of the meta device over the same storages, which are added to `found`."""
    kind = type(x)
    if kind is FakeTensor:
        alias = torch.empty(0, dtype=x.dtype, device=_META)
        found.append(alias.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride()))
        return found[-1]
    if kind is list or kind is tuple:
        return kind([aliases(part, found) for part in x])
    return {name: aliases(part, found) for name, part in x.items()} if kind is dict else x


def is_plain_meta(x: Any) -> bool:
    """Whether it is a tensor of the meta device, and nothing special."""
    return type(x) is Tensor and x.device == _META and x.layout is torch.strided and not x.dtype.is_complex
