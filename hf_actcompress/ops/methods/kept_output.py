"""How an op keeps its own output: once, for itself and for every consumer."""

from __future__ import annotations

import torch
from torch import Tensor

from ...codecs import IDENTITY
from ...records import Record, declare, keep, stored_exact


def _same(y: Tensor) -> Tensor:
    return y


def keep_output(y: Tensor, *, rows: bool = True) -> Record:
    """The record of y, to be saved by the op that returns y; `rows`: its backward needs no row but for its own.

    y is declared as what is kept, so that consumers keep these bytes and no other: through no codec of theirs, and a
    cast of y is derived instead of kept beside it.
    """
    if torch.compiler.is_compiling():
        return stored_exact(y)
    # an alias: the entry must not hold the tensor that it describes
    record = keep(y, IDENTITY) if rows else stored_exact(y.detach())
    declare(y, _same, record)
    return record
