"""Parts and rows of weights: recomputed from the parameter, or from a weight that an adapter has made for one call.

Stock keeps the adapted weight of a stack of experts as a whole, or one part of it for each expert that was chosen, or
rows for each pair of token and expert. The forward has made all of that weight, so to make all of it again for the
parts of one layer takes no memory that was not needed before. Of an activation, a small part is kept instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from .entry import Noted
from .held import Held
from .nodes import gathered_from, rows
from .record import Derived, Record


@dataclass(frozen=True)
class AdaptedWeight:
    """Recompute function of a weight: `compute` makes it of the parameter and the tensors of the adapter."""

    compute: Callable[..., Tensor]

    def __call__(self, *sources: Tensor) -> Tensor:
        """The weight."""
        return self.compute(*sources)


class Keeping(NamedTuple):
    """What a net does.

    Attributes:
        saved: What is held for the tensors that a node has saved.
        keep: Keeps a tensor.
        hold: What to hold for a record.
    """

    saved: Callable[[Any], list[Held]]
    keep: Callable[[Tensor], Held]
    hold: Callable[[Record], Held]


class Weights:
    """The weights that adapters have made in one forward, as they were declared. It holds no tensor."""

    def __init__(self, declared: Noted) -> None:
        self._declared = declared
        # number of a node and of its output -> what is held for that weight, the same for all its parts
        self._held: dict[tuple[int, int], weakref.ref[Held]] = {}

    def made(self, x: Tensor, net: Keeping) -> tuple[Callable[..., Tensor], list[Held]] | None:
        """How x is recomputed, if it is a part of an adapted weight, or rows of any weight; else None."""
        base, source = x._base, gathered_from(x.grad_fn)
        if source is None:
            weight = None if base is None or base.grad_fn is None else self._of(base.grad_fn, base.output_nr, net)
            return None if base is None or weight is None else (_how_part(x, base), [weight])
        index, leaf = net.saved(x.grad_fn), getattr(source[0], "variable", None)
        if len(index) != 1:
            return None
        weight = net.keep(leaf) if isinstance(leaf, Parameter) else self._of(*source, net)
        return None if weight is None else (rows, [weight, *index])

    def _of(self, node: Any, number: int, net: Keeping) -> Held | None:
        """What is held for an adapted weight; None for other outputs."""
        record = self._declared.record(node, number)
        if not isinstance(record, Derived) or not isinstance(record.recipe.recompute, AdaptedWeight):
            return None
        known = self._held.get(output := (node._sequence_nr(), number))
        held = None if known is None else known()
        if held is None:
            held = net.hold(record)
            self._held[output] = weakref.ref(held)
        return held

    def clear(self) -> None:
        """Forget all weights."""
        self._held.clear()


def _how_part(x: Tensor, base: Tensor) -> Callable[[Tensor], Tensor]:
    start = int(x.storage_offset() - base.storage_offset())
    return partial(_part, shape=x.shape, stride=x.stride(), start=start)


def _part(whole: Tensor, shape: tuple[int, ...], stride: tuple[int, ...], start: int) -> Tensor:
    """Recompute function of a part of a weight that is contiguous, as `declare` wants it to be."""
    whole = whole.contiguous()
    return whole.as_strided(shape, stride, int(whole.storage_offset()) + start)
