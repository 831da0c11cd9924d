"""How a program's Function keeps activations: as they are, through a codec, or as records that others keep already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import Parameter

from ..codecs import IDENTITY, Codec
from ..private_apis import above_autograd
from ..records import Record, Stored, is_dropped, known_record, parameter, record_of, stored_exact
from ..records.saving import Leaves, Slot, count, slot_of, slot_of_new
from .left_out import Left, LeftOut


class Packing:
    """A function in the forward's code that packs an activation through a codec, as a record."""

    def __init__(self, codec: Codec, swapped: bool) -> None:
        self.codec, self.swapped = codec, swapped
        self.__name__, self.__module__ = "packed", __name__

    def __call__(self, x: Tensor) -> Stored:
        """The record of x; if `swapped`, x are heads [B, H, T, D], packed as they lie in memory: [B, T, H, D]."""
        return Stored(self.codec, *self.codec.pack(x.transpose(1, 2) if self.swapped else x))


class Later(NamedTuple):
    """An activation that is unpacked or made again when the backward's code gets there."""

    slot: Slot
    tensors: tuple[Tensor, ...]


def opened(x: Tensor | Later) -> Tensor:
    """A function in the backward's code: the kept activation. Another op's code may recompute it, and run autograd."""
    if not isinstance(x, Later):
        return x
    with above_autograd():
        return x.slot.value(x.tensors)


def unpacked(x: Later) -> Tensor:
    """The same for an activation that the program has packed itself. A codec needs no autograd."""
    return x.slot.value(x.tensors)


@fx.node.has_side_effect
def popped(saved: list[Any]) -> Any:
    """A function in the backward's code: takes the last saved tensor off the list, so that only the code holds it."""
    return saved.pop()


def plus(known: Tensor | None, gradient: Tensor) -> Tensor:
    """A function in the backward's code: the sum of two gradients, of which the first may be None."""
    return gradient if known is None else known + gradient


def know_outside(values: Sequence[Any], outside: Sequence[Outside]) -> None:
    """Make the records of activations from outside of which rows are left out, before other ops look for them."""
    for place, codec, flat, fewer in outside:
        if fewer:
            record_of(values[place].flatten(2) if flat else values[place], codec)


class Outside(NamedTuple):
    """A kept activation that was made outside of the program, and may have a registry record.

    Attributes:
        place: Its position among the kept values.
        codec: The codec through which it is kept, if nobody keeps it yet.
        flat: Whether heads [B, T, H, D] are kept as [B, T, H * D], the shape in which a linear layer reads them.
        fewer: Whether some of its rows are left out, in calls that leave rows out.
    """

    place: int
    codec: Codec
    flat: bool = False
    fewer: bool = False


def taken_apart(
    values: list[Any],
    outside: Sequence[Outside],
    keepers: Sequence[str],
    device: torch.device,
    left_out: LeftOut | None = None,
) -> tuple[list[Any], dict[int, Slot], list[str], Left | None]:
    """What to save of values: tensors, records, and activations from outside, which may have a record already.

    Args:
        values: In the order of the plan.
        outside: The activations from outside.
        keepers: The module for which each is kept.
        device: The device of the values.
        left_out: The rows that are left out; None if all are kept.

    Returns:
        The tensors to save, with None in the place of a value that is taken apart, whose tensors are at the end; by its
        place, how each such value is put together again; the module for which each tensor is kept; what the backward
        knows of the rows that are left out.
    """
    slots: dict[int, Slot] = {}
    leaves, names = Leaves(), list(keepers)

    def take(i: int, slot: Slot) -> None:
        slots[i] = slot
        names.extend([keepers[i]] * (len(keepers) + len(leaves.tensors) - len(names)))
        values[i] = None

    for i, codec, flat, fewer in outside:
        x = values[i].flatten(2) if flat else values[i]
        fewer = fewer and left_out is not None
        record = known_record(x) if codec == IDENTITY and not fewer else record_of(x, codec)
        if record is not None and not _is_itself(record) and (fewer or not is_dropped(record)):
            slot = slot_of(record, leaves)
            count(slot)
            take(i, slot)
    for i, value in enumerate(values):
        if type(value) is Stored:
            take(i, slot_of_new(value, leaves))
    left = None if left_out is None else Left.of(left_out, device, leaves, len(values))
    names.extend([""] * (len(values) + len(leaves.tensors) - len(names)))
    return values + leaves.tensors, slots, names, left


def _is_itself(record: Record) -> bool:
    return isinstance(record, Stored) and record.codec == IDENTITY


def put_together(saved: list[Any], slots: dict[int, Slot], count: int) -> list[Any]:
    """The `count` values that `taken_apart` took apart. Those that are unpacked or recomputed are so when opened."""
    values, tensors = saved[:count], tuple(saved[count:])
    for i, slot in slots.items():
        values[i] = Later(slot, tensors)
    return values


def source_of(x: Any, sharded: bool, own: bool) -> Record:
    """The record of one of the sources from which an output is recomputed.

    Args:
        x: A weight, an activation from outside, or the record of one from inside.
        sharded: Whether the weights' memory is freed when the layer has run.
        own: Whether nobody but the program knows the tensor.
    """
    if isinstance(x, Stored):
        return x
    if own:
        return stored_exact(x)
    if type(x) is not Parameter:
        known = known_record(x)
        return stored_exact(x) if known is None else known
    return stored_exact(x.detach().clone()) if sharded else parameter(x)
