"""Sums of embeddings are not kept: backward takes the rows of their weights by the indices again.

What the first layer reads is such a sum as a rule: of tokens, positions and segments, perhaps scaled. Models add them
up in code of their own, but the autograd graph says what was added. Stock keeps the sum, so it allows that a weight is
written between forward and backward. Here that is torch's error for a write in place.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..private_apis import FakeTensor, next_sequence_number
from ._current import current
from .outside import hooks_outside
from .padding import checkpointed
from .record import Derived, Recipe, Record, parameter, stored_exact
from .registry import declare_as, known_record

_KINDS = frozenset({"AddBackward0", "EmbeddingBackward0", "MulBackward0"})
# of how many operations one after the other a sum may be the last
_DEPTH = 12
# an estimate takes the path of the training
_PLAIN = (Parameter, FakeTensor)

# the position of a weight among the sources, which its indices follow; two summands; or a tree and the position of a
# number by which it is multiplied
_Tree = int | tuple[str, "_Tree", "_Tree"]


class _State(threading.local):
    """Of the forward in progress: by its id, each weight and its version at the start; the first autograd node."""

    def __init__(self) -> None:
        self.weights: dict[int, tuple[Tensor, int]] = {}
        self.since = 0


_state = _State()


@contextmanager
def taking_rows_again(weights: Iterable[Tensor]) -> Iterator[None]:
    """One forward, whose backward may take rows of these weights again: those that stay in memory until then."""
    before = _state.weights, _state.since
    _state.weights, _state.since = {id(w): (w, w._version) for w in weights}, next_sequence_number()
    try:
        yield
    finally:
        _state.weights, _state.since = before


class _Sum:
    """Recompute function of a sum of rows; holds no tensor."""

    __slots__ = ("tree",)

    def __init__(self, tree: _Tree) -> None:
        self.tree = tree

    def __call__(self, *sources: Tensor) -> Tensor:
        def value(tree: _Tree) -> Tensor:
            if isinstance(tree, int):
                return torch.embedding(sources[tree], sources[tree + 1])
            kind, first, second = tree
            if kind == "scaled":
                assert isinstance(second, int)
                return value(first) * sources[second]
            return value(first) + value(second)

        return value(self.tree)


def declare_embedded(x: Tensor) -> None:
    """Say that x need not be kept, if it is a sum of rows of embeddings' weights that this forward has not written.

    Only where the weights stay in memory as they are: not in a checkpointed region, whose second run has no frame, and
    not under hooks that would copy the weights (`save_on_cpu`).
    """
    node: Any = x.grad_fn
    if type(node).__name__ not in _KINDS or x._version or torch.compiler.is_compiling():
        return
    if not _state.weights or checkpointed() or (hooks_outside() is not None and current.watcher is None):
        return
    if known_record(x) is not None:
        return
    sources: list[Record] = []
    # autograd gives no indices that were written since, and leaves the error to backward
    with suppress(RuntimeError):
        tree = _tree(node, sources, _DEPTH)
        if tree is not None:
            declare_as(x, Derived(Recipe(_Sum(tree)), tuple(sources)))


def _tree(node: Any, sources: list[Record], depth: int) -> _Tree | None:
    kind = type(node).__name__
    if kind not in _KINDS or not depth or node._sequence_nr() < _state.since:
        return None
    if kind == "EmbeddingBackward0":
        return _lookup(node, sources)
    before = [each for each, _ in node.next_functions]
    if kind == "MulBackward0":
        return _scaled(node, before, sources, depth)
    # a summand without a gradient is not in the graph
    if len(before) != 2 or node._saved_alpha != 1:
        return None
    # a sum of layers ends here at the second summand
    second = _tree(before[1], sources, depth - 1)
    first = None if second is None else _tree(before[0], sources, depth - 1)
    return None if first is None or second is None else ("sum", first, second)


def _lookup(node: Any, sources: list[Record]) -> int | None:
    weight, version = _state.weights.get(id(getattr(node.next_functions[0][0], "variable", None)), (None, 0))
    if weight is None or version != weight._version or type(weight) not in _PLAIN:
        return None
    sources += parameter(weight), stored_exact(node._saved_indices)
    return len(sources) - 2


def _scaled(node: Any, before: list[Any], sources: list[Record], depth: int) -> _Tree | None:
    factor = node._saved_other if before and len(before) == 2 and before[1] is None else None
    if factor is None or factor.dim():
        return None
    scaled = _tree(before[0], sources, depth - 1)
    if scaled is None:
        return None
    sources.append(stored_exact(factor))
    return "scaled", scaled, len(sources) - 1
