"""The nodes of torch that save nothing from which their output could be made, and how it is made from their inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..private_apis import output_metadata

Compute = Callable[..., Tensor]
# a position in a tensor
Place = Sequence[int]


def shape_of(node: Any, number: int) -> torch.Size:
    """The shape of an output of a node."""
    return torch.Size(output_metadata(node, number).shape)


def signed(saved: int) -> int:
    """A dimension or an index of a node, which has it as an unsigned number."""
    return saved if saved < 2**63 else saved - 2**64


def _bound(saved: int | None) -> int | None:
    return None if saved is None else signed(saved)


def _always(compute: Compute, node: Any, number: int) -> Compute:
    return compute


def _without_factor(compute: Compute, node: Any, number: int) -> Compute | None:
    return compute if node._saved_alpha == 1 else None


def _row(compute: Compute, node: Any, number: int) -> Compute:
    return partial(_in_a_row, join=compute, dim=signed(node._saved_dim))


def _in_a_row(*parts: Tensor, join: Compute, dim: int) -> Tensor:
    return join(parts, dim)


def itself(x: Tensor) -> Tensor:
    """Recompute function of a tensor that has the values of its source."""
    return x


def _cast(node: Any, number: int) -> Compute | None:
    """The cast, from the same source. A copy to another device is none."""
    after = output_metadata(node, number)
    same = after.device == output_metadata(*node.next_functions[0]).device
    return partial(Tensor.to, dtype=after.dtype) if same else None


def _no_padding(node: Any, number: int) -> Compute | None:
    return None if any(node._saved_pad) else itself


def _repeat(node: Any, number: int) -> Compute:
    return partial(Tensor.repeat, repeats=node._saved_repeats)


def _expand(node: Any, number: int) -> Compute:
    return partial(torch.broadcast_to, size=shape_of(node, number))


def _order(node: Any) -> tuple[int, ...]:
    """The order of dimensions after a node that exchanges some."""
    if type(node).__name__ == "PermuteBackward0":
        return tuple(map(signed, node._saved_dims))
    dims = [*range(len(shape_of(node, 0)))]
    first, second = signed(node._saved_dim0), signed(node._saved_dim1)
    dims[first], dims[second] = dims[second], dims[first]
    return tuple(dims)


def _permute(node: Any, number: int) -> Compute:
    return partial(torch.permute, dims=_order(node))


def _reshape(node: Any, number: int) -> Compute:
    return partial(torch.reshape, shape=shape_of(node, number))


def _select(node: Any, number: int) -> Compute:
    index = number if type(node).__name__ == "UnbindBackward0" else signed(node._saved_index)
    return partial(torch.select, dim=signed(node._saved_dim), index=index)


def _slice(node: Any, number: int) -> Compute:
    where = slice(_bound(node._saved_start), _bound(node._saved_end), node._saved_step)
    return partial(_sliced, dim=signed(node._saved_dim), where=where)


def _split(node: Any, number: int) -> Compute:
    sizes = node._saved_split_sizes if type(node).__name__ == "SplitWithSizesBackward0" else None
    start = number * node._saved_split_size if sizes is None else sum(sizes[:number])
    size = node._saved_split_size if sizes is None else sizes[number]
    return partial(_sliced, dim=signed(node._saved_dim), where=slice(start, start + size))


def _sliced(x: Tensor, dim: int, where: slice) -> Tensor:
    return x[(*[slice(None)] * (dim % x.dim()), where)]


CAST = "ToCopyBackward0"
# kinds of nodes that save no tensor -> how an output is made from the inputs; None if this node does something else
JOINING_NODES: dict[str, Callable[[Any, int], Compute | None]] = {
    "AddBackward0": partial(_without_factor, torch.add),
    "CatBackward0": partial(_row, torch.cat),
    "CloneBackward0": partial(_always, itself),
    "ConstantPadNdBackward0": _no_padding,
    "NegBackward0": partial(_always, torch.neg),
    "RepeatBackward0": _repeat,
    "StackBackward0": partial(_row, torch.stack),
    "SubBackward0": partial(_without_factor, torch.sub),
    CAST: _cast,
}
# the same, without memory of their own
VIEWS: dict[str, Callable[[Any, int], Compute]] = {
    "AliasBackward0": partial(_always, itself),
    "ExpandBackward0": _expand,
    "PermuteBackward0": _permute,
    "ReshapeAliasBackward0": _reshape,
    "SelectBackward0": _select,
    "SliceBackward0": _slice,
    "SplitBackward0": _split,
    "SplitWithSizesBackward0": _split,
    "SqueezeBackward0": _reshape,
    "SqueezeBackward1": _reshape,
    "SqueezeBackward2": _reshape,
    "TransposeBackward0": _permute,
    "UnbindBackward0": _select,
    "UnsafeViewBackward0": _reshape,
    "UnsqueezeBackward0": _reshape,
    "ViewBackward0": _reshape,
}
# nodes of copies, which hold other data than any tensor before them
COPIES = frozenset(
    ("CatBackward0", "CloneBackward0", "ConstantPadNdBackward0", "RepeatBackward0", "StackBackward0",
     "UnsafeViewBackward0")
)  # fmt: skip
_PRODUCTS: dict[str, Compute] = {"DivBackward0": torch.div, "MulBackward0": torch.mul}
# products whose factors may be exchanged
_SWAPPED = frozenset(("MulBackward0",))
_RESHAPING = frozenset(name for name, make in VIEWS.items() if make is _reshape)


def inputs_of(node: Any, number: int) -> list[tuple[Any, int]] | None:
    """The nodes and outputs from which a node makes its output; None if it reads another tensor without a gradient."""
    before = [] if node is None else [*node.next_functions]
    inputs = [each for each in before if each[0] is not None]
    name = type(node).__name__
    # a cache joins the first keys to none at all
    alone = name == "CatBackward0" and len(inputs) == 1 and shape_of(*inputs[0]) == shape_of(node, number)
    return inputs if inputs and (len(inputs) == len(before) or alone or name in _PRODUCTS) else None


def compute_of(node: Any, number: int) -> Compute | None:
    """How an output is made from the inputs alone; None if that takes more, or if no table has this node."""
    make = JOINING_NODES.get(type(node).__name__) or VIEWS.get(type(node).__name__)
    return None if make is None else make(node, number)


def product_of(node: Any) -> Compute | None:
    """How a product with a tensor without a gradient is made, or a quotient by one; None for other nodes."""
    without = [before is None for before, _ in node.next_functions]
    name = type(node).__name__
    return _PRODUCTS[name] if name in _PRODUCTS and sum(without) == 1 and (without[-1] or name in _SWAPPED) else None


def number_of(node: Any) -> Tensor | None:
    """The number [] by which a node multiplies or divides; None if its second factor is no number.

    Torch packs no numbers. What hooks have packed is not read: those of a checkpoint would run the region again.
    """
    saved = None if node.next_functions[1][0] is not None else node._raw_saved_other
    if saved is None or saved.unpack_hook is not None:
        return None
    number: Tensor = saved.data
    return None if number.dim() else number


class Widths(NamedTuple):
    """A padding with one value: how wide it is, and a place in it."""

    widths: tuple[int, ...]
    place: Place


def padding_of(node: Any) -> Widths | None:
    """The padding that a node adds; None for other nodes, and if it takes something off."""
    widths = tuple(map(signed, node._saved_pad)) if type(node).__name__ == "ConstantPadNdBackward0" else ()
    if min(widths, default=-1) < 0 or not any(widths):
        return None
    shape = shape_of(node, 0)
    i = next(i for i, width in enumerate(widths) if width)
    dim = len(shape) - 1 - i // 2
    return Widths(widths, [shape[dim] - 1 if i % 2 and d == dim else 0 for d in range(len(shape))])


def padded(x: Tensor, fill: Tensor, widths: tuple[int, ...]) -> Tensor:
    """Recompute function of x with a padding of the value `fill` []; `widths` as in `torch.nn.functional.pad`."""
    shape, inner = [*x.shape], [slice(None)] * x.dim()
    for i in range(0, len(widths), 2):
        dim = x.dim() - 1 - i // 2
        inner[dim] = slice(widths[i], widths[i] + x.size(dim))
        shape[dim] += widths[i] + widths[i + 1]
    y = fill.expand(shape).clone(memory_format=torch.contiguous_format)
    y[tuple(inner)] = x
    return y


def moved(node: Any, place: Place) -> Place | None:
    """Where an element of a node's input is in its output; None if this is not known."""
    name = type(node).__name__
    if name in ("AliasBackward0", "CloneBackward0"):
        return place
    if name in ("PermuteBackward0", "TransposeBackward0"):
        return [place[dim] for dim in _order(node)]
    if name not in _RESHAPING:
        return None
    index, after = 0, shape_of(node, 0)
    for i, size in zip(place, shape_of(*node.next_functions[0]), strict=True):
        index = index * size + i
    return [index // math.prod(after[dim + 1 :]) % size for dim, size in enumerate(after)]
