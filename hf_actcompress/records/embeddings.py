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
from .record import Derived, Recipe, Stored, parameter, stored_exact
from .registry import declare_as, known_record

_KINDS = frozenset({"AddBackward0", "EmbeddingBackward0", "MulBackward0"})
# of how many operations one after the other a sum may be the last
_DEPTH = 12
# an estimate takes the path of the training
_PLAIN = (Parameter, FakeTensor)

# "rows", the position of a weight among the sources, which its indices follow, and its id; "sum" and two summands; or
# "scaled", what is scaled, and the position of the number
_Tree = tuple[str, Any, Any]


class _State(threading.local):
    """Of the forward in progress: by its id, each weight and its version at the start; the first autograd node."""

    def __init__(self) -> None:
        self.weights: dict[int, tuple[Tensor, int]] = {}
        self.since = 0
        self.proved: dict[_Tree, bool] = {}


_state = _State()


@contextmanager
def taking_rows_again(weights: Iterable[Tensor], proved: dict[Any, bool]) -> Iterator[None]:
    """One forward, whose backward may take rows of embeddings' weights again.

    Args:
        weights: Those that stay in memory until backward.
        proved: Which sums of them have come back bit by bit; filled here.
    """
    before = _state.weights, _state.since, _state.proved
    _state.weights, _state.since = {id(w): (w, w._version) for w in weights}, next_sequence_number()
    _state.proved = proved
    try:
        yield
    finally:
        _state.weights, _state.since, _state.proved = before


class _Sum:
    """Recompute function of a sum of rows; holds no tensor."""

    __slots__ = ("tree",)

    def __init__(self, tree: _Tree) -> None:
        self.tree = tree

    def __call__(self, *sources: Tensor) -> Tensor:
        def value(tree: _Tree) -> Tensor:
            kind, first, second = tree
            if kind == "rows":
                return torch.embedding(sources[first], sources[first + 1])
            if kind == "scaled":
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
    sources: list[Stored] = []
    # autograd gives no indices that were written since, and leaves the error to backward
    with suppress(RuntimeError):
        tree = _tree(node, sources, _DEPTH)
        if tree is not None and _is_made_again(x, tree, sources):
            declare_as(x, Derived(Recipe(_Sum(tree)), tuple(sources)))


def _is_made_again(x: Tensor, tree: _Tree, sources: list[Stored]) -> bool:
    """Whether the sum comes back bit by bit: the graph does not show writes into a summand under no_grad.

    It is tried once per model and kind of sum.
    """
    if isinstance(x, FakeTensor):
        return True
    if tree not in _state.proved:
        with torch.no_grad():
            again = _Sum(tree)(*(source.tensors[0] for source in sources))
        _state.proved[tree] = again.dtype == x.dtype and torch.equal(again, x)
    return _state.proved[tree]


def _tree(node: Any, sources: list[Stored], depth: int) -> _Tree | None:
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


def _lookup(node: Any, sources: list[Stored]) -> _Tree | None:
    weight, version = _state.weights.get(id(getattr(node.next_functions[0][0], "variable", None)), (None, 0))
    if weight is None or version != weight._version or type(weight) not in _PLAIN:
        return None
    sources += parameter(weight), stored_exact(node._saved_indices)
    return "rows", len(sources) - 2, id(weight)


def _scaled(node: Any, before: list[Any], sources: list[Stored], depth: int) -> _Tree | None:
    factor = node._saved_other if before and len(before) == 2 and before[1] is None else None
    if factor is None or factor.dim():
        return None
    scaled = _tree(before[0], sources, depth - 1)
    if scaled is None:
        return None
    sources.append(stored_exact(factor))
    return "scaled", scaled, len(sources) - 1
