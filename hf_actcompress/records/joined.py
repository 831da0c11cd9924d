"""Tensors that join others which are kept anyway: sums of residual branches, concatenations, maps in another order.

The node of a sum saves nothing, so it does not have what the sum is made from. But what went into the sum is often
kept or recomputed: the sum of a BatchNorm's output and a shortcut, or of a layer's input and its scaled output. Then
the sum need not be kept. So it is with windows of a norm's output, and with a norm's output that is rotated. A chain
of sums (the residual stream) is kept at every `LONGEST`-th sum, so that backward never makes more than that many sums
at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ..private_apis import FakeTensor
from ._current import current
from .held import Again, Held, Kept, Made, value_of
from .joining import (
    CAST,
    COPIES,
    JOINING_NODES,
    VIEWS,
    Compute,
    compute_of,
    inputs_of,
    itself,
    moved,
    number_of,
    padded,
    padding_of,
    product_of,
    shape_of,
)
from .nodes import POINTWISE_NODES
from .outside import Hooks
from .saving import Slot, is_lossless_slot

# the most joined tensors in a chain in which each one is made from the one before it
LONGEST = 4
# how many nodes, without views, lie between a joined tensor and what is kept
_NODES = 16
# the most elements of an intermediate result, in multiples of the joined tensor's: to make a small part of a large
# tensor again, backward would need more memory at a time than is saved
_WIDER = 2


class Finder(NamedTuple):
    """What is held of the graph of a tensor.

    Attributes:
        x: The tensor, which is to be recomputed.
        output: What is held for the output of a node with that number; None if it is not kept.
        saved: What is held for the tensors that a node has saved.
        keep: Keeps a tensor.
    """

    x: Tensor
    output: Callable[[Any, int], Held | None]
    saved: Callable[[Any], list[Held]]
    keep: Callable[[Tensor], Held]


def is_asked(x: Tensor) -> bool:
    """Whether our own ops ask the net about x before they keep it.

    They ask if the node that made x copies or is pointwise; if x is [B, C, H, W], any node of the table will do. For a
    cast, the node before it (and before views) decides; they also ask if what that node made has a record.
    """
    node: Any = x.grad_fn
    kind = type(node).__name__
    if kind == CAST:
        number = 0
        while kind == CAST or kind in VIEWS:
            node, number = node.next_functions[0]
            kind = type(node).__name__
        declared = None if current.net is None else current.net.declared
        if declared is not None and declared.record(node, number) is not None:
            return True
    # a pooled map that is kept may be a part of a sum that is not
    return kind in COPIES or kind in POINTWISE_NODES or (x.dim() == 4 and kind in JOINING_NODES)


class Joined(NamedTuple):
    """How a tensor is made from others.

    Attributes:
        compute: Takes the sources.
        sources: What is held for them.
        kind: Equal for tensors that are made in the same way.
        nodes: How many nodes of the table lie between the tensor and its sources.
    """

    compute: Compute
    sources: tuple[Held, ...]
    kind: Hashable
    nodes: int


def joined(
    node: Any, number: int, finder: Finder, first: Held | None = None, way: tuple[Any, ...] = ()
) -> Joined | None:
    """How an output of a node is recomputed; None if a part of it is not kept.

    Args:
        node: The node.
        number: Which of its outputs.
        finder: Finds what is held.
        first: What is held for the node's first input, if that is known already.
        way: The nodes between this one and the tensor x, from x on.
    """
    inputs = inputs_of(node, number)
    step = None if inputs is None else _step(node, number, finder, way)
    if inputs is None or step is None:
        return None
    sources: list[Held] = []
    kinds: list[Hashable] = []
    nodes = int(type(node).__name__ not in VIEWS)
    # the last summand is more often the one that is not kept: the first is that of all layers before
    for at, (before, output) in reversed([*enumerate(inputs)]):
        held = finder.output(before, output) if at or first is None else first
        if not _is_there(held) and math.prod(shape_of(before, output)) > _WIDER * finder.x.numel():
            held = None
            if type(before).__name__ not in VIEWS:
                return None
        if held is None:
            inner = joined(before, output, finder, way=(*way, node))
            if inner is None:
                return None
            held, nodes = Made(inner.compute, inner.sources), nodes + inner.nodes
            kinds.append(inner.kind)
        sources.insert(0, held)
        if nodes > _NODES:
            return None
    compute, further = step
    kind = type(node).__name__, compute_options(node), len(sources), *kinds
    return Joined(compute, (*sources, *further()), kind, nodes)


def _is_there(held: Held | None) -> bool:
    """Whether the value need not be made."""
    return isinstance(held, Kept) and held.slot is None


def _step(
    node: Any, number: int, finder: Finder, way: tuple[Any, ...]
) -> tuple[Compute, Callable[[], list[Held]]] | None:
    """How a node's output is made from its inputs and further sources, and these sources."""
    compute = compute_of(node, number)
    if compute is not None:
        return compute, list
    product = product_of(node)
    if product is not None:
        factor = made_exactly(itself, finder.saved(node), finder.x)
        if factor is not None and len(factor.sources) == 1:
            return product, lambda: [*factor.sources]
        scale = number_of(node)
        return None if scale is None else (product, lambda: [finder.keep(scale)])
    padding = padding_of(node)
    place = None if padding is None else padding.place
    for after in reversed(way):
        place = None if place is None else moved(after, place)
    if padding is None or place is None:
        return None
    # the node does not say what it has filled in, so an element of the padding is kept
    return partial(padded, widths=padding.widths), lambda: [finder.keep(finder.x.detach()[tuple(place)].clone())]


def compute_options(node: Any) -> str:
    """What a node's output depends on besides its inputs."""
    return f"{getattr(node, '_saved_dim', '')} {getattr(node, '_saved_dims', '')}"


def is_exact(held: Held) -> bool:
    """Whether the value has the bits of the saved tensor, and may be read more than once."""
    if isinstance(held, Kept):
        return held.slot is None or is_lossless_slot(held.slot)
    return not isinstance(held, Again) and (not isinstance(held, Made) or all(map(is_exact, held.sources)))


def length(held: Held) -> int:
    """How many joined tensors are made one from the other until this value is there."""
    if not isinstance(held, Made):
        return 0
    return held.joined + max(map(length, held.sources), default=0)


def made_exactly(compute: Compute, sources: Iterable[Held], x: Tensor) -> Made | None:
    """As `Made`, for a part of x; None if its bits would not be those of the part."""
    found = [unsharded(source, x) if is_exact(source) else None for source in sources]
    held = [source for source in found if source is not None]
    return Made(compute, held) if len(held) == len(found) else None


def unsharded(held: Held, x: Tensor) -> Held | None:
    """What to hold for a part of x instead of a weight that FSDP or ZeRO-3 may shard until x is recomputed.

    A small weight (the scale of a layer) is copied; for a large one this is None.
    """
    if not distributed() or not isinstance(held, Kept) or held.slot is not None:
        return held
    part = held.parts[0]
    if isinstance(part, Tensor) and part.numel() <= x.numel() // 16:
        copy = part.detach().clone()
        return Kept((copy,), None if held.versions is None else (copy._version,), None)
    weight = not isinstance(part, Tensor) or isinstance(part, Parameter) or isinstance(part._base, Parameter)
    return None if weight else held


def distributed() -> bool:
    """Whether other processes may have parts of this model."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _in_order(*sources: Tensor, compute: Compute, stride: tuple[int, ...]) -> Tensor:
    y = compute(*sources)
    if y.stride() == stride:
        return y
    return torch.empty_strided(y.shape, stride, dtype=y.dtype, device=y.device).copy_(y)


def made_in_order(compute: Compute, sources: Iterable[Held], x: Tensor, *, joined: bool = False) -> Made:
    """As `Made`, for x, whose dimensions then lie in memory as they do in x.

    The order decides which kernel a convolution runs, and so the last bits of its gradient.
    """
    return Made(partial(_in_order, compute=compute, stride=x.stride()), sources, joined)


def slotted(slot: Slot) -> Compute:
    """Recompute function of a record's value from the tensors that the record would keep."""
    return lambda *kept: slot.value(kept)


class Trials:
    """Tries whether the joins of one forward give their tensors bit by bit, each of them once for a model.

    A summand may have been written on without a gradient, which no node shows.

    Args:
        proved: For each join that an earlier forward tried, whether it gives its tensor; filled here.
        outside: The hooks outside of the net.
        readable: Whether what these hooks have packed may be read in the forward.
    """

    def __init__(self, proved: dict[Hashable, bool], outside: Hooks | None, readable: bool) -> None:
        self._proved, self._outside, self._readable = proved, outside, readable
        # how many joins the forward has had
        self._count = 0

    def pass_for(self, held: Made, x: Tensor, kind: Hashable) -> bool:
        """Whether `held`, a join of this kind, gives x, in a chain that is not too long."""
        self._count += 1
        if length(held) > LONGEST:
            return False
        join = self._count, kind, x.dtype, x.dim(), x.device.type
        if isinstance(x, FakeTensor):
            return self._proved.get(join, True)
        if join not in self._proved:
            if not self._readable:
                return False
            try:
                self._proved[join] = self._gives(held, x)
            except (RuntimeError, TypeError):
                # a source was written on, or another version of torch says otherwise what a node did
                self._proved[join] = False
        return self._proved[join]

    @torch.no_grad()
    def _gives(self, held: Made, x: Tensor) -> bool:
        again = value_of(held, self._outside)
        same = again.dtype == x.dtype and again.shape == x.shape and again.stride() == x.stride()
        return same and bool(((again == x) | ((again != again) & (x != x))).all())
