"""`save` and `load` put records on an autograd ctx and take them off, always through `ctx.save_for_backward`."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from .. import compilation
from ..codecs import IDENTITY, Codec
from ..compiling import is_compiling
from .padding import RealRows
from .record import Derived, Pending, Recipe, Record, Stored
from .storages import storage_sizes


class _StoredSlot(NamedTuple):
    """Positions of a stored record's tensors among the saved tensors of a ctx."""

    codec: Codec
    meta: object
    positions: tuple[int, ...]

    def value(self, saved: tuple[Tensor, ...]) -> Tensor:
        return self.codec.unpack(tuple([saved[i] for i in self.positions]), self.meta)


class _DerivedSlot(NamedTuple):
    """A derived record on a ctx: the recipe and where its sources are. No tensor."""

    recipe: Recipe
    sources: tuple[Slot, ...]

    def value(self, saved: tuple[Tensor, ...]) -> Tensor:
        return self.recipe.value(lambda: [source.value(saved) for source in self.sources])


Slot = _StoredSlot | _DerivedSlot


class Leaves:
    """The tensors that are saved for a list of records. Each is in it once."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._position: dict[int, int] = {}
        # id of a batch's padding that is not kept -> (the rows, the position of the tensor with their order)
        self.dropped: dict[int, tuple[RealRows, int]] = {}

    def add(self, x: Tensor) -> int:
        position = self._position.setdefault(id(x), len(self.tensors))
        if position == len(self.tensors):
            self.tensors.append(x)
        return position


def slot_of_new(record: Stored, leaves: Leaves) -> Slot:
    """As `slot_of`, for a record that was just made, so that no other record has its tensors."""
    first = len(leaves.tensors)
    leaves.tensors += record.tensors
    return _StoredSlot(record.codec, record.meta, tuple(range(first, len(leaves.tensors))))


def slot_of(record: Record, leaves: Leaves) -> Slot:
    """How the record's value is computed from `leaves`, to which its tensors are added. Counts no consumer."""
    if type(record) is Pending:
        record = record.packed()
    if type(record) is Stored:
        return _StoredSlot(record.codec, record.meta, tuple([leaves.add(t) for t in record.tensors]))
    assert type(record) is Derived, "what packs makes a stored or a derived record"
    sources = tuple([slot_of(source, leaves) for source in record.sources])
    back = record.recipe.recompute
    if isinstance(back, RealRows):
        order = sources[1]
        assert isinstance(order, _StoredSlot)
        leaves.dropped[id(back.guard)] = (back, order.positions[0])
    return _DerivedSlot(record.recipe, sources)


def count(slot: Slot | None) -> None:
    """Count one more consumer of the slot's value."""
    if isinstance(slot, _DerivedSlot):
        slot.recipe.uses += 1
        # only the consumer that rebuilds first in a backward reads the sources, so they count one use, not one per
        # consumer
        if slot.recipe.uses == 1:
            for source in slot.sources:
                if type(source) is _DerivedSlot:
                    count(source)


def save(ctx: Any, *records: Record | None) -> None:
    """Keep records for backward, in order; for a None, `load` returns None at the same place.

    A slot on ctx that is an integer is the position of a tensor that is kept as it is.

    Saves: the tensors of every stored record and the stored sources of every derived one, each once, through
    `ctx.save_for_backward`, so that checkpointing, offloading hooks and `retain_graph` see all of them.
    """
    if is_compiling():
        ctx.save_for_backward(*(None if r is None else _stored_tensor(r) for r in records))
        return
    # None in place of zeros where an output has no gradient (`ops.first_order`)
    ctx.set_materialize_grads(False)
    leaves, slots = Leaves(), list[Slot | int | None]()
    for record in records:
        if record is None:
            slots.append(None)
        elif type(record) is Stored and record.codec is IDENTITY:
            slots.append(leaves.add(record.tensors[0]))
        else:
            slot = slot_of(record, leaves)
            count(slot)
            slots.append(slot)
    ctx.slots = slots
    ctx.dropped = tuple(leaves.dropped.values())
    ctx.save_for_backward(*leaves.tensors)


def _stored_tensor(record: Record) -> Tensor:
    """Under `torch.compile`: the value, unpacked from tensors marked as kept; the partitioner recomputes it."""
    assert isinstance(record, Stored), "nothing is derived in a graph"
    kept = (x if isinstance(x, Parameter) else compilation.keep(x) for x in record.tensors)
    return record.codec.unpack(tuple(kept), record.meta)


def load_packed(ctx: Any, *dy: Tensor | None) -> tuple[Any, ...]:
    """As `load`, but a value that was stored through a codec is returned as `Stored`.

    This is for consumers that can compute with the packed bytes.
    """
    if is_compiling():
        return tuple(ctx.saved_tensors)
    saved = ctx.saved_tensors
    _check_padding(ctx, saved, dy)

    def value(slot: Slot | int | None) -> Tensor | Stored | None:
        if isinstance(slot, _StoredSlot) and slot.codec != IDENTITY:
            return Stored(slot.codec, tuple(saved[i] for i in slot.positions), slot.meta)
        return None if slot is None else _value(slot, saved)

    return tuple(value(slot) for slot in ctx.slots)


def load(ctx: Any, *dy: Tensor | None, rows: int | None = None) -> tuple[Any, ...]:
    """The values of what `save` kept, in order. Derived ones are rebuilt here. None where None was saved.

    Args:
        ctx: The ctx of the Function.
        dy: The incoming gradients: [B, S, ...] or [B * S, ...] if x [B, S, ...] was saved. If padding rows were
            dropped, the guard checks that dy is zero there, because only then the values are right.
        rows: The position of the saved tensor that says to which row each gradient of dy [K] belongs; None: dy has all
            rows in order.
    """
    if is_compiling():
        return tuple(ctx.saved_tensors)
    saved = ctx.saved_tensors
    slots: list[Slot | int | None] = ctx.slots
    of = None if rows is None else slots[rows]
    _check_padding(ctx, saved, dy, of if of is None else _value(of, saved))
    return tuple([None if slot is None else _value(slot, saved) for slot in slots])


def _value(slot: Slot | int, saved: tuple[Tensor, ...]) -> Tensor:
    return saved[slot] if isinstance(slot, int) else slot.value(saved)


def load_one(ctx: Any, dy: Tensor) -> tuple[Tensor, bool]:
    """As `load`, for the only record that `save` kept; also returns whether the caller may write into the value.

    It may if the value was rebuilt for this call alone.
    """
    saved = ctx.saved_tensors
    _check_padding(ctx, saved, (dy,))
    (slot,) = ctx.slots
    x = _value(slot, saved)
    alone = isinstance(slot, _DerivedSlot) and slot.recipe.uses == 1 and x.is_contiguous()
    return x, alone and not storage_sizes([x]).keys() & storage_sizes(saved).keys()


def _check_padding(
    ctx: Any, saved: tuple[Tensor, ...], dy: tuple[Tensor | None, ...], of: Tensor | None = None
) -> None:
    assert dy or not ctx.dropped, "an op that keeps activations hands its incoming gradient to `load`"
    for back, position in ctx.dropped:
        for grad in dy:
            if grad is not None:
                back.check(saved[position], grad, of)
