"""How an op keeps its own output: once, for itself and for every consumer."""

from __future__ import annotations

import torch
from torch import Tensor

from ...codecs import IDENTITY
from ...records import Record, declare, keep, stored_exact


def _same(y: Tensor) -> Tensor:
    return y


def keep_output(y: Tensor, *, rows: bool = True) -> Record:
    """The record of y, to be saved by the op that returns y; `rows`: whether its backward treats each row by itself.

    y is declared to be this record, so that consumers keep the same bytes and no others: they do not store y through
    their own codec, and a cast of y is derived instead of kept in addition.
    """
    if torch.compiler.is_compiling():
        return stored_exact(y)
    # an alias: the entry must not hold the tensor that it describes
    record = keep(y, IDENTITY) if rows else stored_exact(y.detach())
    declare(y, _same, record)
    return record
