"""Small ops on records: producers that declare their output, consumers that keep their input, a bf16 codec."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_actcompress.codecs import IDENTITY, Codec
from hf_actcompress.records import Derived, Pending, declare, load, record_of, save, stored_exact

SHAPE = (16, 32)


@dataclass(frozen=True)
class Half:
    """A lossy codec that stores any tensor in bf16. `log` lists its calls."""

    log: list[str] = field(default_factory=list, compare=False)

    @property
    def lossless(self) -> bool:
        return False

    def pack(self, x: Tensor) -> tuple[tuple[Tensor, ...], object]:
        self.log.append("pack")
        return (x.to(torch.bfloat16, copy=True).contiguous(),), x.dtype

    def unpack(self, tensors: tuple[Tensor, ...], meta: object) -> Tensor:
        self.log.append("unpack")
        assert isinstance(meta, torch.dtype)
        return tensors[0].to(meta)


class _Producer(torch.autograd.Function):
    """y = sin(x): keeps x, declares y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, recompute: Callable[[Tensor], Tensor], codec: Codec) -> Tensor:
        y = torch.sin(x)
        record = record_of(x, codec)
        save(ctx, record)
        declare(y, recompute, record)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (x,) = load(ctx)
        return dy * torch.cos(x), None, None


class _Consumer(torch.autograd.Function):
    """z = h^2: keeps h by its record; `seen` gets a weak reference to the value that backward was given."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, codec: Codec, seen: list[Any] | None) -> Tensor:
        save(ctx, record_of(h, codec))
        ctx.seen = seen
        return h * h

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor, None, None]:
        (h,) = load(ctx)
        if ctx.seen is not None:
            ctx.seen.append(weakref.ref(h))
        return 2 * h * dz, None, None


class KeepRecords(torch.autograd.Function):
    """Consumes any records; backward adds their values up."""

    @staticmethod
    def forward(ctx, x, *records):
        save(ctx, *records)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return (dy + sum(load(ctx)), *[None] * len(ctx.slots))


def produce(x: Tensor, recompute: Callable[[Tensor], Tensor] = torch.sin, codec: Codec = IDENTITY) -> Tensor:
    return _Producer.apply(x, recompute, codec)


def consume(h: Tensor, codec: Codec = IDENTITY, seen: list[Any] | None = None) -> Tensor:
    return _Consumer.apply(h, codec, seen)


def stock(x: Tensor) -> Tensor:
    """What consume(produce(x)) computes, in plain torch."""
    return torch.sin(x) ** 2


def two_consumers(
    x: Tensor, recompute: Callable[[Tensor], Tensor] = torch.sin, seen: list[Any] | None = None
) -> Tensor:
    y = produce(x, recompute)
    return consume(y, seen=seen) + consume(y, seen=seen) * 3


def leaf(*shape: int) -> Tensor:
    return torch.randn(*(shape or SHAPE), requires_grad=True)


def declared(x: Tensor) -> Tensor:
    """sin(x), declared by hand and not by an op."""
    y = torch.sin(x)
    declare(y, torch.sin, stored_exact(x))
    return y


def is_derived(x: Tensor) -> bool:
    return isinstance(record_of(x), Derived)


def value_of(record: Any) -> Tensor:
    """The value that a record stands for, computed at once."""
    if isinstance(record, Pending):
        record = record.packed()
    if hasattr(record, "codec"):
        return record.codec.unpack(record.tensors, record.meta)
    return record.recipe.recompute(*map(value_of, record.sources))
