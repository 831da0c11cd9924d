"""The two kinds of record, and the recipe by which a derived one is rebuilt once per backward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..codecs import IDENTITY, Codec


@dataclass(frozen=True)
class Stored:
    """Bytes that are kept: `codec.unpack(tensors, meta)` is the activation."""

    codec: Codec
    tensors: tuple[Tensor, ...]
    meta: object = None


@dataclass(frozen=True)
class Derived:
    """Nothing is kept for this activation: `recipe.recompute(*sources)` makes it again."""

    recipe: Recipe
    sources: tuple[Record, ...]


Record = Stored | Derived


def raw(x: Tensor) -> Stored:
    """The record of a weight, a statistic, an RNG state, a mask or an index: kept as it is, under every preset."""
    return Stored(IDENTITY, (x,))


def leaves(record: Record) -> Iterator[Tensor]:
    """The tensors that keeping `record` keeps."""
    if isinstance(record, Stored):
        yield from record.tensors
    else:
        for source in record.sources:
            yield from leaves(source)


def is_lossless(record: Record) -> bool:
    """Whether the record gives the activation back bit by bit."""
    if isinstance(record, Stored):
        return record.codec.lossless
    return all(is_lossless(source) for source in record.sources)


class Recipe:
    """How a derived activation is recomputed, shared by all its consumers. It holds no tensor between backwards.

    `uses` counts the consumers that saved it. Within one backward (one graph task) the first consumer to ask computes
    the value, the last one drops it. What a partial backward leaves over is dropped when that backward ends.
    """

    __slots__ = ("_left", "_lock", "_task", "_value", "recompute", "uses")

    def __init__(self, recompute: Callable[..., Tensor]) -> None:
        self.recompute = recompute
        self.uses = 0
        self._left = 0
        self._task = -1
        self._value: Tensor | None = None
        # consumers on several devices run in several autograd threads; under torch.compile nothing is shared, and a
        # lock cannot be traced
        compiling = torch.compiler.is_compiling()
        self._lock: AbstractContextManager[Any] = nullcontext() if compiling else threading.RLock()

    def value(self, load_sources: Callable[[], Sequence[Tensor]]) -> Tensor:
        """The rebuilt activation; `load_sources` is called only if it is not at hand from an earlier consumer."""
        task = torch._C._current_graph_task_id()
        if self.uses == 1 or task == -1:
            return self.recompute(*load_sources())
        with self._lock:
            value = self._value
            if value is None or self._task != task:
                value = self.recompute(*load_sources())
                self._value, self._task, self._left = value, task, self.uses
                torch.autograd.Variable._execution_engine.queue_callback(lambda: self._forget(task))  # type: ignore[no-untyped-call]
            self._left -= 1
            if self._left <= 0:
                self._value = None
            return value

    def _forget(self, task: int) -> None:
        with self._lock:
            if self._task == task:
                self._value = None
