"""The memory behind tensors of any layout. A sparse tensor has no storage of its own, but its parts have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


def storages_of(x: Tensor) -> list[torch.UntypedStorage]:
    """The storages of x: one, or those of a sparse tensor's parts; none if torch gives no access to them."""
    return [part.untyped_storage() for part in _strided_parts(x)]


def storage_sizes(tensors: Iterable[Any]) -> dict[int, int]:
    """The bytes of each storage, counted once. Values that are no tensors are left out.

    The key is the storage itself, because fake tensors have no address.
    """
    found = (storage for x in tensors if isinstance(x, Tensor) for storage in storages_of(x))
    return {storage._cdata: storage.nbytes() for storage in found}


def _strided_parts(x: Tensor) -> tuple[Tensor, ...]:
    if x.layout is torch.strided:
        return (x,)
    if x.layout is torch.sparse_coo:
        return x._indices(), x._values()
    if x.layout in _ROWS:
        return x.crow_indices(), x.col_indices(), x.values()
    if x.layout in _COLUMNS:
        return x.ccol_indices(), x.row_indices(), x.values()
    return ()
