"""Outputs of a plan that are recomputed from what the plan keeps, for a reader behind it that would keep them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..compilation.policy import is_cheap, is_statistic, is_view
from ..ops._linear_attention import SEGMENTS
from ..ops.opaque import ATTEND, LINEAR
from ..ops.traced_tiles import TILED
from ..records import Derived, declare, restores_rows
from .batch_norms import BATCH_NORMS, copy_without_statistics, read_again
from .code import forward_code
from .divide import Halves
from .keeping import source_of
from .rules import PRODUCTS

# how many tensors an output may be made of, beside weights
_SOURCES = 8
# what costs too much to compute again, and what needs the call of the layer, which a reader behind the layer lacks
_NEVER = PRODUCTS | {
    ATTEND, LINEAR, SEGMENTS, TILED, torch.ops.aten._grouped_mm.default, torch.ops.aten.convolution.default,
}  # fmt: skip
# what is computed again although no rule of the policy says that it is cheap
_ALSO = BATCH_NORMS | {operator.getitem}
_Back = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Recomputed:
    """How an output is recomputed from what a plan keeps, for a reader behind it that would keep the output.

    Attributes:
        output: The place of the output.
        code: Makes it of the sizes and the sources.
        sizes: The places of the integers among the kept ones.
        sources: The places of the tensors among the kept ones.
        own: For each of them, whether the plan has made it.
        weights: For each of them, whether it is a weight.
    """

    output: int
    code: _First
    sizes: tuple[int, ...]
    sources: tuple[int, ...]
    own: tuple[bool, ...]
    weights: tuple[bool, ...]

    def declare(self, y: Tensor, kept: Sequence[Tensor], sizes: Sequence[int], sharded: bool) -> None:
        """Declare that y is recomputed; `sharded`: whether the weights' memory is freed when the layer has run."""
        places = zip(self.sources, self.own, self.weights, strict=True)
        sources = [source_of(kept[i], own or weight, copied=sharded and weight) for i, own, weight in places]
        if any(isinstance(source, Derived) and not restores_rows(source) for source in sources):
            # from layer to layer, the first backward would make all of them again at once
            return
        declare(y, self.code.of([sizes[i] for i in self.sizes]), *sources)


def recomputed(halves: Halves, place: int, y: Node, backs: Mapping[Node, _Back], parameters: int) -> Recomputed | None:
    """How an output is recomputed from kept tensors by cheap nodes; None if it is not.

    Args:
        halves: The graphs.
        place: The place of the output.
        y: The output.
        backs: What gives kept tensors that are packed in another arrangement, of what is unpacked.
        parameters: How many of the inputs, the first ones, are weights.
    """
    if y in halves.kept or y.op == "placeholder" or not y.meta["val"].is_floating_point():
        return None
    needs: list[Node] = []
    sizes: list[Node] = []
    seen: set[Node] = set()
    pending = [y]
    while pending:
        x = pending.pop()
        if x in seen:
            continue
        seen.add(x)
        if x in halves.kept:
            needs.append(x)
        elif x in halves.sizes:
            sizes.append(x)
        elif not _is_recomputed(x):
            return None
        else:
            pending += read_again(x)
    inputs = halves.inputs
    if sum(x not in inputs[:parameters] for x in needs) > _SOURCES:
        return None
    graph = Graph()
    given = [graph.placeholder(x.name) for x in (*sizes, *needs)]
    copied = dict(zip((*sizes, *needs), given, strict=True))
    for x, placeholder in copied.items():
        placeholder.meta = dict(x.meta)
    for x in halves.forward.graph.nodes:
        if x in seen and x not in copied:
            copied[x] = copy_without_statistics(graph, x, copied)
    run = forward_code(graph, given, [copied[y]], [])
    own = tuple(x not in inputs for x in needs)
    weights = tuple(x in inputs[:parameters] for x in needs)
    code = _First(run, [backs.get(x) for x in needs])
    of_sizes, sources = tuple(map(halves.sizes.index, sizes)), tuple(map(halves.kept.index, needs))
    return Recomputed(place, code, of_sizes, sources, own, weights)


class _First:
    """A function that returns the first item of what another one returns. That one takes the `sizes`, and then tensors,
    which `backs` prepare.
    """

    def __init__(
        self, run: Callable[..., tuple[Any, ...]], backs: Sequence[_Back | None], sizes: Sequence[int] = ()
    ) -> None:
        self._run, self._backs, self._sizes = run, backs, sizes

    def of(self, sizes: Sequence[int]) -> _First:
        """The same function for other sizes."""
        return _First(self._run, self._backs, sizes) if sizes else self

    def __call__(self, *args: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self(*args)
        given = [x if back is None else back(x) for x, back in zip(args, self._backs, strict=True)]
        return self._run(*self._sizes, *given)[0]  # type: ignore[no-any-return]


def _is_recomputed(x: Node) -> bool:
    if x.op != "call_function" or x.target in _NEVER:
        return False
    is_size = isinstance(x.meta.get("val"), (int, torch.SymInt))
    return is_size or is_cheap(x) or is_view(x) or is_statistic(x) or x.target in _ALSO
