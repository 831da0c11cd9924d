"""The three kinds of record, and the recipe by which a derived one is rebuilt once per backward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..codecs import IDENTITY, Codec
from ..compiling import is_compiling
from ..private_apis import at_end_of_backward, current_backward


# nobody writes to a record; it is not frozen because that would take three times as long, several times per layer
@dataclass(eq=False, slots=True)
class Stored:
    """Bytes that are kept: an activation as its codec packed it."""

    codec: Codec
    tensors: tuple[Tensor, ...]
    meta: object = None

    def unpack(self) -> Tensor:
        return self.codec.unpack(self.tensors, self.meta)


@dataclass(eq=False, slots=True)
class Derived:
    """Nothing is kept for this activation: `recipe.recompute(*sources)` makes it again."""

    recipe: Recipe
    sources: tuple[Record, ...]


class Pending:
    """Bytes that are kept only if a consumer saves them: the first consumer packs them, and the others share them.

    A producer declares its output as derived from its input before anyone knows whether that output is kept. If it
    is not (a dropout before a residual sum), nothing is packed.

    Args:
        x: The activation. An alias of its data is held until it is packed.
        pack: Makes the record of x. It holds no tensor.
        dropped: Whether that record leaves padding rows out.
        lossless: Whether that record gives x back bit by bit.
    """

    __slots__ = ("_made", "_version", "_x", "dropped", "lossless", "pack")

    def __init__(self, x: Tensor, pack: Callable[[Tensor], Record], *, dropped: bool, lossless: bool) -> None:
        self._x: Tensor | None = x.detach()
        self.pack, self.dropped, self.lossless = pack, dropped, lossless
        self._version = x._version
        self._made: Record | None = None

    @property
    def version(self) -> int:
        """x's version counter now; after x was packed, its version at that time."""
        return self._x._version if self._x is not None else self._version

    def packed(self) -> Record:
        """The record; the first call makes it."""
        if self._made is None:
            assert self._x is not None
            self._version = self._x._version
            self._made = self.pack(self._x)
            self._x = None
        return self._made


Record = Stored | Derived | Pending


def stored_exact(x: Tensor) -> Stored:
    """The record of a weight, a statistic, an RNG state, a mask or an index: kept as it is, under every preset."""
    return Stored(IDENTITY, (x,))


def parameter(x: Tensor) -> Stored:
    """The record of a weight: a reference to the data that it has now.

    If autograd kept the parameter itself, backward would see other data after ``param.data = ...``. Stock ops keep
    views of the data, so an alias is kept here, too. Under ZeRO-3 the parameter itself is kept: its data are freed
    after a forward and gathered again for the backward, and an alias would hold the gathered data.
    """
    if is_compiling() or hasattr(x, "ds_id"):
        return stored_exact(x)
    return stored_exact(x.detach())


def versions(record: Record) -> list[int]:
    """The version counters of the tensors that the record is made of. A write in place changes them."""
    if isinstance(record, Stored):
        return [x._version for x in record.tensors]
    if isinstance(record, Pending):
        return [record.version]
    found = []
    for source in record.sources:
        found += [x._version for x in source.tensors] if type(source) is Stored else versions(source)
    return found


def is_lossless(record: Record) -> bool:
    """Whether the record gives the activation back bit by bit."""
    if isinstance(record, Stored):
        return record.codec.lossless
    if isinstance(record, Pending):
        return record.lossless
    return all([is_lossless(source) for source in record.sources])


class Recipe:
    """How a derived activation is recomputed, shared by all its consumers. It holds no tensor between backwards.

    `uses` counts the consumers that saved it. Within one backward (one graph task) the first consumer to ask computes
    the value, the last one drops it. A value that a partial backward has left over is dropped when that backward ends.
    """

    __slots__ = ("_left", "_lock", "_task", "_value", "recompute", "uses")

    def __init__(self, recompute: Callable[..., Tensor]) -> None:
        self.recompute = recompute
        self.uses = 0
        self._left = 0
        self._task = -1
        self._value: Tensor | None = None
        # consumers on several devices run in several autograd threads
        self._lock = threading.RLock()

    def value(self, load_sources: Callable[[], Sequence[Tensor]]) -> Tensor:
        """The rebuilt activation. `load_sources` is called only by the first consumer in a backward."""
        task = current_backward()
        if self.uses == 1 or task == -1:
            return self.recompute(*load_sources())
        with self._lock:
            value = self._value
            if value is None or self._task != task:
                value = self.recompute(*load_sources())
                self._value, self._task, self._left = value, task, self.uses
                at_end_of_backward(lambda: self._forget(task))
            self._left -= 1
            if self._left <= 0:
                self._value = None
            return value

    def _forget(self, task: int) -> None:
        with self._lock:
            if self._task == task:
                self._value = None
