"""A dtype cast that keeps nothing and whose output is derived: all adapters that cast the same input share a record."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..codecs import IDENTITY, Codec
from ..records import (
    Derived,
    Record,
    Stored,
    applied,
    declare_as,
    known_record,
    may_write,
    shared_copy,
    shared_derivation,
)
from .first_order import once_differentiable


def cast_record(x: Tensor, dtype: torch.dtype, codec: Codec = IDENTITY) -> Record:
    """The record of ``x.to(dtype)``, one for all consumers of x.

    It is derived if x itself is derived, encoded, or no wider than the cast. Otherwise the narrower cast copy is kept,
    and where hooks may write on x.
    """
    known = known_record(x)
    as_it_is = codec == IDENTITY and (known is None or isinstance(known, Stored))
    if (as_it_is and dtype.itemsize < x.dtype.itemsize) or may_write():
        return shared_copy(x, ("cast", dtype), lambda: x.detach().to(dtype))
    return shared_derivation(x, ("cast", dtype), partial(Tensor.to, dtype=dtype), codec)


class CastFunction(torch.autograd.Function):
    """Keeps nothing; declares its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, codec: Codec) -> Tensor:
        ctx.x_dtype = x.dtype
        y = x.to(dtype)
        record = cast_record(x, dtype, codec)
        if isinstance(record, Derived):
            declare_as(y, record)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return dy.to(ctx.x_dtype), None, None


def cast(x: Tensor, dtype: torch.dtype, *, codec: Codec = IDENTITY) -> Tensor:
    """``x.to(dtype)`` of any shape. Saves nothing; consumers of the result keep x by its record. Gradient exact."""
    if x.dtype == dtype:
        return x
    return applied(CastFunction, x, dtype, codec)
