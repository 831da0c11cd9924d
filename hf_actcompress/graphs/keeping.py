"""How a plan keeps activations: as they are, through a codec, or as records that others keep already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..codecs import IDENTITY, Codec
from ..ops.opaque_graph import Box, Ran
from ..private_apis import above_autograd
from ..records import Derived, Record, Stored, is_dropped, known_record, record_of, stored_exact
from ..records.saving import Leaves, Slot, count, slot_of, slot_of_new


class Later(NamedTuple):
    """An activation that is unpacked or recomputed when the backward's code gets there."""

    slot: Slot | _RanSlot
    tensors: tuple[Tensor, ...]


def opened(x: Tensor | Later) -> Tensor:
    """A function in the backward's code: the kept activation. Another op's code may recompute it, and run autograd."""
    if not isinstance(x, Later):
        return x
    with above_autograd():
        return x.slot.value(x.tensors)


class Outside(NamedTuple):
    """A kept activation that was made outside of the layer, and may have a registry record.

    Attributes:
        place: Its position among the kept values.
        codec: The codec through which it is kept, if nobody keeps it yet.
    """

    place: int
    codec: Codec


class _RanSlot(NamedTuple):
    """Where the end of an attention function's own graph is among the saved tensors."""

    place: int
    box: Box

    def value(self, saved: tuple[Tensor, ...]) -> Any:
        return Ran(saved[self.place], self.box)


def taken_apart(
    values: list[Any], outside: Sequence[Outside], keepers: Sequence[str], left_out: bool
) -> tuple[list[Any], dict[int, Slot | _RanSlot], list[str]]:
    """What to save of values: tensors, records, and activations from outside, which may have a record already.

    Args:
        values: In the order of the plan.
        outside: The activations from outside.
        keepers: The module for which each is kept.
        left_out: Whether rows may be left out.

    Returns:
        The tensors to save, with None in the place of a value that is taken apart, whose tensors are at the end; by its
        place, how each such value is put together again; the module for which each tensor is kept.
    """
    slots: dict[int, Slot | _RanSlot] = {}
    leaves, names = Leaves(), list(keepers)

    def take(i: int, slot: Slot | _RanSlot) -> None:
        slots[i] = slot
        names.extend([keepers[i]] * (len(keepers) + len(leaves.tensors) - len(names)))
        values[i] = None

    for i, codec in outside:
        x = values[i]
        record = known_record(x) if codec == IDENTITY and not left_out else record_of(x, codec)
        if record is not None and not _is_itself(record) and (left_out or not is_dropped(record)):
            slot = slot_of(record, leaves)
            count(slot)
            take(i, slot)
    for i, value in enumerate(values):
        if type(value) is Stored:
            take(i, slot_of_new(value, leaves))
        elif type(value) is Derived:
            slot = slot_of(value, leaves)
            count(slot)
            take(i, slot)
        elif type(value) is Ran:
            leaves.tensors.append(value.end)
            take(i, _RanSlot(len(leaves.tensors) - 1, value.box))
    names.extend([""] * (len(values) + len(leaves.tensors) - len(names)))
    return values + leaves.tensors, slots, names


def _is_itself(record: Record) -> bool:
    return isinstance(record, Stored) and record.codec == IDENTITY


def put_together(saved: list[Any], slots: dict[int, Slot | _RanSlot], count: int) -> list[Any]:
    """The `count` values that `taken_apart` took apart. Those that are unpacked or recomputed are so when opened."""
    values, tensors = saved[:count], tuple(saved[count:])
    for i, slot in slots.items():
        values[i] = Later(slot, tensors)
    return values


def source_of(x: Any, own: bool, copied: bool) -> Record:
    """The record of one of the sources from which an output is recomputed.

    Args:
        x: A weight, an activation from outside, or the record of one from inside.
        own: Whether the registry has no record of it: of a weight, or of a tensor that nobody but the plan knows.
        copied: Whether its memory is freed before the output is recomputed.
    """
    if isinstance(x, (Stored, Derived)):
        return x
    if copied:
        return stored_exact(x.clone())
    known = None if own else known_record(x)
    return stored_exact(x) if known is None else known
