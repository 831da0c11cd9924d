"""Sums of embeddings are not kept: backward takes the rows of the weights by the indices again.

What the first layer reads is such a sum as a rule, of tokens, positions and segments. Models add them up in code of
their own, so the autograd graph says what was added.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import Parameter

from ..private_apis import FakeTensor
from .nodes import gathered_from
from .padding import checkpointed
from .record import Derived, Recipe, Record, parameter, stored_exact

_LOOKUPS = ("EmbeddingBackward0", "IndexBackward0")
_KINDS = frozenset({*_LOOKUPS, "AddBackward0"})
# of a sum: of how many sums it may be the last
_DEPTH = 4
# as in `modules/base.py`: an estimate takes the path of the training
_PLAIN = (Parameter, FakeTensor)

# the position of a weight among the sources, which its indices follow; or two summands
_Tree = int | tuple["_Tree", "_Tree"]


class _Sum:
    """Recompute function of a sum of rows; holds no tensor."""

    __slots__ = ("tree",)

    def __init__(self, tree: _Tree) -> None:
        self.tree = tree

    def __call__(self, *sources: Tensor) -> Tensor:
        def value(tree: _Tree) -> Tensor:
            if isinstance(tree, int):
                return torch.embedding(sources[tree], sources[tree + 1])
            return value(tree[0]) + value(tree[1])

        return value(self.tree)


def embedded(x: Tensor) -> Derived | None:
    """The record of x, if it is a sum of rows of parameters that stay in memory until backward; None for others.

    Where processes share a model, a parameter's memory may be freed when its module has run: there it is None. In a
    checkpointed region it is None because the second run of the region may find other autograd nodes.
    """
    node: Any = x.grad_fn
    if type(node).__name__ not in _KINDS or x._version or torch.compiler.is_compiling():
        return None
    if (distributed.is_available() and distributed.is_initialized()) or checkpointed():
        return None
    sources: list[Record] = []
    tree = _tree(node, sources, _DEPTH)
    return None if tree is None else Derived(Recipe(_Sum(tree)), tuple(sources))


def _tree(node: Any, sources: list[Record], depth: int) -> _Tree | None:
    kind = type(node).__name__
    if kind in _LOOKUPS:
        return _lookup(node, kind, sources)
    # an operand without a gradient is not in the graph
    before = [each for each, _ in node.next_functions] if kind == "AddBackward0" and depth else []
    if len(before) != 2 or not all(type(each).__name__ in _KINDS for each in before) or node._saved_alpha != 1:
        return None
    # a sum of layers ends here at the second operand
    second, first = [_tree(each, sources, depth - 1) for each in reversed(before)]
    return None if first is None or second is None else (first, second)


def _lookup(node: Any, kind: str, sources: list[Record]) -> int | None:
    if kind == "IndexBackward0":
        weight = gathered_from(node)
        index = None if weight is None else node._saved_indices[0]
    else:
        weight, index = getattr(node.next_functions[0][0], "variable", None), node._saved_indices
    if not isinstance(weight, Parameter) or type(weight) not in _PLAIN or weight.dim() != 2:
        return None
    if index.dtype not in (torch.int32, torch.int64) or index.device != weight.device:
        return None
    sources += parameter(weight), stored_exact(index)
    return len(sources) - 2
