"""`save` and `load`: records in and out of an autograd ctx, always through `ctx.save_for_backward`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..codecs import IDENTITY, Codec
from .record import Recipe, Record, Stored


@dataclass(frozen=True)
class _StoredSlot:
    """Positions of a stored record's tensors among the saved tensors of a ctx."""

    codec: Codec
    meta: object
    positions: tuple[int, ...]

    def value(self, saved: tuple[Tensor, ...]) -> Tensor:
        return self.codec.unpack(tuple(saved[i] for i in self.positions), self.meta)


@dataclass(frozen=True)
class _DerivedSlot:
    """A derived record on a ctx: the recipe and where its sources are. No tensor."""

    recipe: Recipe
    sources: tuple[_Slot, ...]

    def value(self, saved: tuple[Tensor, ...]) -> Tensor:
        return self.recipe.value(lambda: [source.value(saved) for source in self.sources])


_Slot = _StoredSlot | _DerivedSlot


class _Leaves:
    """The tensors that one ctx saves, each once."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._position: dict[int, int] = {}

    def add(self, x: Tensor) -> int:
        if id(x) not in self._position:
            self._position[id(x)] = len(self.tensors)
            self.tensors.append(x)
        return self._position[id(x)]


def _slot(record: Record, leaves: _Leaves, counted: bool = True) -> _Slot:
    if isinstance(record, Stored):
        return _StoredSlot(record.codec, record.meta, tuple(leaves.add(t) for t in record.tensors))
    first = False
    if counted:
        record.recipe.uses += 1
        # the sources are asked once per backward, by the first consumer that rebuilds
        first = record.recipe.uses == 1
    return _DerivedSlot(record.recipe, tuple(_slot(source, leaves, first) for source in record.sources))


def save(ctx: Any, *records: Record | None) -> None:
    """Keep records for backward, in order; None keeps a place.

    Saves: the tensors of every stored record and the stored sources of every derived one, each once, through
    `ctx.save_for_backward`, so that checkpointing, offloading hooks and `retain_graph` see all of them.
    """
    if torch.compiler.is_compiling():
        ctx.save_for_backward(*(None if r is None else _stored_tensor(r) for r in records))
        return
    leaves = _Leaves()
    ctx.slots = tuple(None if record is None else _slot(record, leaves) for record in records)
    ctx.save_for_backward(*leaves.tensors)


def _stored_tensor(record: Record) -> Tensor:
    """Under `torch.compile` the partitioner decides what is kept; hand it the plain value."""
    if isinstance(record, Stored):
        return record.codec.unpack(record.tensors, record.meta)
    return record.recipe.recompute(*(_stored_tensor(source) for source in record.sources))


@dataclass(frozen=True)
class Packed:
    """What a codec made of an activation, not unpacked: for consumers that can work on it as it is."""

    codec: Codec
    tensors: tuple[Tensor, ...]
    meta: object

    def unpack(self) -> Tensor:
        return self.codec.unpack(self.tensors, self.meta)


def load_packed(ctx: Any) -> tuple[Any, ...]:
    """As `load`, but what was stored through a codec comes as `Packed`."""
    if torch.compiler.is_compiling():
        return tuple(ctx.saved_tensors)
    saved = ctx.saved_tensors

    def value(slot: _Slot | None) -> Tensor | Packed | None:
        if isinstance(slot, _StoredSlot) and slot.codec != IDENTITY:
            return Packed(slot.codec, tuple(saved[i] for i in slot.positions), slot.meta)
        return None if slot is None else slot.value(saved)

    return tuple(value(slot) for slot in ctx.slots)


def load(ctx: Any) -> tuple[Any, ...]:
    """The values of what `save` kept, in order, derived ones rebuilt; None where None was saved."""
    if torch.compiler.is_compiling():
        return tuple(ctx.saved_tensors)
    saved = ctx.saved_tensors
    slots: tuple[_Slot | None, ...] = ctx.slots
    return tuple(None if slot is None else slot.value(saved) for slot in slots)
