"""Tensors that join others which are kept anyway: sums of residual branches, concatenations, maps in another order.

The node of a sum saves nothing, so it does not have what the sum is made from. But what went into the sum is often
kept or made again: the sum of a BatchNorm's output and a shortcut, or of a layer's input and its scaled output. Then
the sum need not be kept. A chain of sums (the residual stream) is kept at every `LONGEST`-th sum, so that backward
never makes more than that many sums at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ..private_apis import FakeTensor
from .held import Again, Held, Kept, Made, value_of
from .outside import Hooks
from .record import Recipe
from .saving import Slot, is_lossless_slot

# how many joined tensors are made one from the other
LONGEST = 4
# how many nodes lie between a joined tensor and what is kept
_NODES = 12

_Compute = Callable[..., Tensor]


def _sum(node: Any) -> _Compute | None:
    return torch.add if node._saved_alpha == 1 else None


def _difference(node: Any) -> _Compute | None:
    return torch.sub if node._saved_alpha == 1 else None


def _joined_along(*parts: Tensor, dim: int) -> Tensor:
    return torch.cat(parts, dim)


def _cat(node: Any) -> _Compute:
    return partial(_joined_along, dim=_signed(node._saved_dim))


def _permute(node: Any) -> _Compute:
    return partial(torch.permute, dims=tuple(map(_signed, node._saved_dims)))


def _copy(node: Any) -> _Compute:
    return _itself


def _itself(x: Tensor) -> Tensor:
    return x


def _signed(saved: int) -> int:
    # a node has a dimension as an unsigned number
    return saved if saved < 2**63 else saved - 2**64


# kinds of nodes that save no tensor -> how the output is made from the inputs; None if this node does something else
JOINING_NODES: dict[str, Callable[[Any], _Compute | None]] = {
    "AddBackward0": _sum,
    "CatBackward0": _cat,
    "CloneBackward0": _copy,
    "PermuteBackward0": _permute,
    "SubBackward0": _difference,
}


def is_joined_map(x: Tensor) -> bool:
    """Whether x [B, C, H, W] is made by a node of the table."""
    return x.dim() == 4 and type(x.grad_fn).__name__ in JOINING_NODES


class Joined(NamedTuple):
    """How a tensor is made from others.

    Attributes:
        compute: Takes the sources.
        sources: What is held for them.
        kind: Equal for tensors that are made in the same way.
        nodes: How many nodes of the table lie between the tensor and its sources.
    """

    compute: _Compute
    sources: tuple[Held, ...]
    kind: Hashable
    nodes: int


def joined(node: Any, kept: Callable[[Any, int], Held | None], first: Held | None = None) -> Joined | None:
    """How the output of a node of the table is made again; None if a part of it is not kept.

    Args:
        node: The node.
        kept: Finds what is held for an output of another node, by the number of the output.
        first: What is held for the node's first input, if that is known already.
    """
    make = JOINING_NODES.get(type(node).__name__)
    compute = None if make is None else make(node)
    if compute is None:
        return None
    sources: list[Held] = []
    kinds: list[Hashable] = []
    nodes = 1
    for before, number in node.next_functions:
        held, first = first, None
        if held is None:
            held = None if before is None else kept(before, number)
        if held is None:
            inner = joined(before, kept) if before is not None and number == 0 else None
            if inner is None:
                return None
            held, nodes = made(inner.compute, inner.sources), nodes + inner.nodes
            kinds.append(inner.kind)
        sources.append(held)
        if nodes > _NODES:
            return None
    return Joined(compute, tuple(sources), (type(node).__name__, compute_options(node), *kinds), nodes)


def compute_options(node: Any) -> str:
    """What a node's output depends on besides its inputs."""
    return f"{getattr(node, '_saved_dim', '')} {getattr(node, '_saved_dims', '')}"


def made(compute: _Compute, sources: Iterable[Held], *, joined: bool = False) -> Made:
    """A tensor that is computed in backward from these sources."""
    return Made(Recipe(compute), tuple(sources), joined)


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


def made_exactly(compute: _Compute, sources: Iterable[Held], x: Tensor) -> Made | None:
    """As `made`, for a part of x; None if its bits would not be those of the part."""
    found = [unsharded(source, x) if is_exact(source) else None for source in sources]
    held = [source for source in found if source is not None]
    return made(compute, held) if len(held) == len(found) else None


def unsharded(held: Held, x: Tensor) -> Held | None:
    """What to hold for a part of x instead of a weight that FSDP or ZeRO-3 may shard until x is made again.

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


class InMemoryOrder:
    """Recompute function of a tensor whose dimensions lie in memory as they did the first time.

    The order decides which kernel a convolution runs, and so the last bits of its gradient.
    """

    __slots__ = ("compute", "stride")

    def __init__(self, compute: _Compute, stride: tuple[int, ...]) -> None:
        self.compute, self.stride = compute, stride

    def __call__(self, *sources: Tensor) -> Tensor:
        y = self.compute(*sources)
        if y.stride() == self.stride:
            return y
        return torch.empty_strided(y.shape, self.stride, dtype=y.dtype, device=y.device).copy_(y)


def made_in_order(compute: _Compute, sources: Iterable[Held], x: Tensor, *, joined: bool = False) -> Made:
    """As `made`, for x, whose dimensions then lie in memory as they do in x."""
    return made(InMemoryOrder(compute, x.stride()), sources, joined=joined)


class Slotted:
    """Recompute function of a record's value from the tensors that the record would keep."""

    __slots__ = ("slot",)

    def __init__(self, slot: Slot) -> None:
        self.slot = slot

    def __call__(self, *kept: Tensor) -> Tensor:
        return self.slot.value(kept)


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
            with torch.no_grad():
                again = value_of(held, self._outside)
                same = again.dtype == x.dtype and again.shape == x.shape and again.stride() == x.stride()
                self._proved[join] = same and bool(((again == x) | ((again != again) & (x != x))).all())
        return self._proved[join]
