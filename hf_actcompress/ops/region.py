"""Results that a checkpointed layer keeps, so that the ops which made them do not run when the layer runs again."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .. import compilation
from ..records import applied
from ._linear import no_view

_region: ContextVar[Region | None] = ContextVar("region", default=None)
_Results = tuple[Tensor, ...]


class KeptResultsFunction(torch.autograd.Function):
    """A node that keeps tensors, so that hooks around the checkpointed layer see them. No gradient goes through it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *results: Tensor) -> Tensor:
        ctx.save_for_backward(*results)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


class Region:
    """A checkpointed layer, which runs once in forward and again in backward.

    It is called in place of the layer, by whatever function checkpoints it. What `result_in_region` computes in the
    first run is not computed in the second. A later backward through the same graph computes it again.

    Args:
        layer: The layer's forward.
    """

    def __init__(self, layer: Callable[..., Any]) -> None:
        self._layer = layer
        # the results of the first run, in order, and their versions, which a write in place would change
        self._made: list[tuple[_Results, list[int]]] = []
        self._sizes: list[int] = []
        self._kept: Tensor | None = None
        self._again: list[_Results] = []
        self.is_first = True

    def __call__(self, *args: Any) -> Any:
        if self._kept is not None:
            node: Any = self._kept.grad_fn
            tensors = iter(node.saved_tensors)
            self._again = [tuple(next(tensors) for _ in range(size)) for size in self._sizes]
            self._kept = None
        token = _region.set(self)
        try:
            return self._layer(*args)
        finally:
            _region.reset(token)
            self.is_first, self._again = False, []

    def keep(self) -> None:
        """Keep the results. To be called after the layer's first run, outside of the function that checkpoints it."""
        made, self._made = self._made, []
        if made and all([x._version for x in results] == versions for results, versions in made):
            self._sizes = [len(results) for results, _ in made]
            tensors = [x for results, _ in made for x in results]
            anchor = torch.empty(0, device=tensors[0].device, requires_grad=True)
            # torch 2.11 frees what a node has saved with the last tensor that the node returned
            self._kept = applied(KeptResultsFunction, anchor, *tensors)

    def result(self, compute: Callable[[], _Results]) -> _Results:
        if self._again:
            # the calling Function returns these tensors, so they must not be views
            return tuple(no_view(x.detach()) for x in self._again.pop(0))
        # checkpointing compares what both runs save, and in the second run `compute` saves nothing
        with saved_tensors_hooks(Tensor.detach, lambda x: x):
            found = compute()
        if self.is_first:
            self._made.append((tuple(x.detach() for x in found), [x._version for x in found]))
        return found


def result_in_region(compute: Callable[[], _Results]) -> _Results:
    """What `compute` returns. In the second run of a checkpointed layer that kept it, `compute` does not run again."""
    region = region_in_progress()
    return compute() if region is None else region.result(compute)


def region_in_progress() -> Region | None:
    """The innermost checkpointed layer that keeps results and runs now; None in a traced forward."""
    region = _region.get()
    return None if region is None or compilation.is_traced() else region
