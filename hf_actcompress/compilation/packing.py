"""Codecs in compiled graphs. A saved value is packed where the forward makes it, and unpacked where backward first
reads it. Both are traced into the graphs as plain torch ops, which the compiler fuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..codecs import Codec
from ..codecs.table import CODECS
from ..errors import CodecError
from ..reference.bits import pack_mask, unpack_mask
from .attribution import attributed
from .calls import between_functions, called, can_call, copied, in_memory
from .functional import functional
from .policy import CODEC, hint, made_by, numel
from .transfers import with_transfers

aten = torch.ops.aten
# ops whose backward reads the sign of their input or result
_RELUS = {aten.relu.default, aten.leaky_relu.default, aten.hardtanh.default}
# the fewest elements for which a mask is packed
_MASK = 1024


def pack_saved(forward: GraphModule, backward: GraphModule, outputs: int, *, calls: bool = False) -> None:
    """Change both graphs so that every saved value with a codec is passed to backward in packed form.

    Args:
        forward, backward: The graphs, which are changed in place.
        outputs: How many of the first outputs of `forward` belong to the caller; all further ones are for backward.
        calls: Whether the compiler can compile a graph once that is called several times.
    """
    output = next(node for node in reversed(forward.graph.nodes) if node.op == "output")
    returned = list(output.args[0])  # type: ignore[arg-type]
    read = {node.name: node for node in backward.graph.nodes if node.op == "placeholder"}
    together = _bases([x for x in returned[outputs:] if _codec_of(x) is not None])
    saved: list[Any] = returned[:outputs]
    unpacked: dict[Node, Node] = {}
    traces, sizes = _Traces(), _Sizes(forward.graph, backward.graph)
    for x in returned[outputs:]:
        codec = _codec_of(x)
        if codec is None:
            saved.append(x)
            continue
        base = together.get(x, x)
        if base not in unpacked:
            tensors, meta = _pack(forward.graph, base, codec, traces, calls)
            users = [read[y.name] for y in returned[outputs:] if y is x or together.get(y) is base]
            unpacked[base] = _unpack(backward.graph, base, read[x.name], users, tensors, codec, meta, traces, sizes)
            saved.extend(tensors)
        _replace(backward.graph, read[x.name], unpacked[base], _views(x, base))
    if unpacked:
        output.args = (tuple([*saved, *sizes.saved]),)
        output.meta.pop("desc", None)
        for module in (forward, backward):
            module.graph.eliminate_dead_code()


class _Bits:
    """Packs a mask: 8 elements per byte."""

    def pack(self, x: Tensor) -> tuple[tuple[Tensor, ...], object]:
        return (pack_mask(x),), x.shape

    def unpack(self, tensors: tuple[Tensor, ...], meta: Any) -> Tensor:
        return unpack_mask(tensors[0], meta)


_BITS = _Bits()


def _codec_of(x: Any) -> Codec | _Bits | None:
    """The codec of a saved value; None if it is kept as it is."""
    value = x.meta.get("val") if isinstance(x, Node) else None
    if not isinstance(value, Tensor):
        return None
    if value.dtype == torch.bool:
        # a mask that is an input is held by the caller anyway, so packing it would only add bytes
        return _BITS if made_by(x).op != "placeholder" and numel(value) >= _MASK else None
    name = x.meta.get(CODEC) or made_by(x).meta.get(CODEC)
    if not name or not value.is_floating_point():
        return None
    return CODECS[name].keeping_sign() if is_of_a_relu(made_by(x)) else CODECS[name]


def is_of_a_relu(x: Node) -> bool:
    """Whether a ReLU returned x, or reads x or a view of it."""
    readers = [x, *x.users]
    for node in readers:
        if node.target in _RELUS:
            return True
        if node is not x and made_by(node) is x:
            readers.extend(node.users)
    return False


def _bases(saved: Sequence[Node]) -> dict[Node, Node]:
    """Saved view -> the tensor that several saved values are views of; its memory is kept and packed once."""
    of: dict[Node, list[Node]] = {}
    for x in saved:
        of.setdefault(made_by(x), []).append(x)
    found: dict[Node, Node] = {}
    for base, views in of.items():
        fewer = numel(base.meta["val"]) <= sum(numel(x.meta["val"]) for x in views)
        if len(views) > 1 and fewer and all(len(n.all_input_nodes) == 1 for x in views for n in _views(x, base)):
            found.update(dict.fromkeys(views, base))
    return found


def _views(x: Node, base: Node) -> list[Node]:
    """The nodes that compute x from base, in order."""
    chain: list[Node] = []
    while x is not base:
        chain.insert(0, x)
        x = x.all_input_nodes[0]
    return chain


class _Traces:
    """The graphs of codecs. Equal layers share them: there is one per codec and layout of tensor."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[GraphModule, object]] = {}

    def pack(self, codec: Codec | _Bits, value: Tensor) -> tuple[GraphModule, object]:
        """The graph that packs such a tensor, and the codec's static data."""
        static: list[object] = []

        def pack(value: Tensor) -> tuple[Tensor, ...]:
            tensors, meta = codec.pack(value)
            static.append(meta)
            return tensors

        return self._of(codec, value, lambda: (_trace(pack, [value]), static[-1]))

    def unpack(
        self, codec: Codec | _Bits, meta: object, count: int, inputs: Sequence[Any], like: Tensor
    ) -> GraphModule:
        """The graph that makes a tensor like `like`, in the same memory order, from the first `count` inputs.

        Those are the packed tensors. The other inputs are the tensor's symbolic sizes, so that the trace finds them.
        """
        order = _order(like)

        def unpack(*inputs: Any) -> tuple[Tensor]:
            value = codec.unpack(inputs[:count], meta)
            return (value if order is None else _laid_out(value, order),)

        return self._of((codec, "unpack"), like, lambda: (_trace(unpack, inputs), None))[0]

    def _of(
        self, what: object, value: Tensor, trace: Callable[[], tuple[GraphModule, object]]
    ) -> tuple[GraphModule, object]:
        sizes = (*value.shape, *value.stride())
        if not all(type(size) is int for size in sizes):
            # in a graph for any length each tensor has its own symbols, so a trace cannot be shared
            try:
                return trace()
            except Exception as error:
                raise CodecError(
                    f"{what} cannot be traced for tensors of any length; choose another codec, or a graph for each "
                    "length: torch.compile(..., dynamic=False)"
                ) from error
        key = what, sizes, value.dtype, value.device
        if key not in self._known:
            self._known[key] = trace()
        return self._known[key]


def _pack(graph: Graph, x: Node, codec: Codec | _Bits, traces: _Traces, calls: bool) -> tuple[list[Node], object]:
    """Insert after x the nodes that pack it. Returns the packed tensors' nodes and the codec's static data."""
    traced, meta = traces.pack(codec, x.meta["val"])
    # a mask is made in registers
    if calls and codec is not _BITS and can_call(traced):
        place = between_functions(x) or _behind(x)
        made = called(graph, traced, [in_memory(graph, x)], place)
    else:
        made = copied(graph, traced, [x], _behind(x))
    attributed(made, x)
    return made, meta


def _behind(x: Node) -> Node:
    """The first node after x at which calls may be inserted."""
    node = x.next
    while node.op == "placeholder":
        node = node.next
    return node


def _unpack(
    graph: Graph,
    base: Node,
    x: Node,
    users: Sequence[Node],
    tensors: Sequence[Node],
    codec: Codec | _Bits,
    meta: object,
    traces: _Traces,
    sizes: _Sizes,
) -> Node:
    """Put placeholders of the packed `tensors` before placeholder x, and unpack `base` where `users` are first read."""
    places = []
    for i, tensor in enumerate(tensors):
        with graph.inserting_before(x):
            place = graph.placeholder(f"{x.name}_packed_{i}")
        place.meta = dict(tensor.meta)
        places.append(place)
    order = {node: i for i, node in enumerate(graph.nodes)}
    first = min((reader for user in users for reader in user.users), key=order.__getitem__)
    like = base.meta["val"]
    places += sizes.of(base)
    traced = traces.unpack(codec, meta, len(tensors), [place.meta["val"] for place in places], like)
    (value,) = copied(graph, traced, places, first)
    return value


def _order(x: Tensor) -> list[int] | None:
    """The order of x's axes in memory; None for a contiguous tensor."""
    strides, sizes = ([hint(size) for size in y] for y in (x.stride(), x.shape))
    contiguous = [math.prod(sizes[i + 1 :]) for i in range(x.dim())]
    if all(size == 1 or a == b for size, a, b in zip(sizes, strides, contiguous, strict=True)):
        return None
    return sorted(range(x.dim()), key=lambda i: (-strides[i], i))


def _laid_out(x: Tensor, order: list[int]) -> Tensor:
    """x with its axes in that order in memory, because the code that reads it was traced for such strides."""
    return x.permute(order).contiguous().permute([order.index(i) for i in range(x.dim())])


def _replace(graph: Graph, x: Node, value: Node, views: Sequence[Node]) -> None:
    """Replace the placeholder x by the value, seen through `views`."""
    for view in views:
        source = value
        with graph.inserting_after(source):
            value = graph.node_copy(view, lambda _, source=source: source)  # type: ignore[misc]
        value.meta = {"val": view.meta["val"]}
    x.replace_all_uses_with(value)
    graph.erase_node(x)


class _Sizes:
    """Symbolic sizes that backward needs to unpack. Some are passed to backward already; others are saved in addition.

    Attributes:
        saved: Nodes of the forward that are saved only because of this.
    """

    def __init__(self, forward: Graph, backward: Graph) -> None:
        self._forward, self._backward = forward, backward
        places = [node for node in backward.nodes if node.op == "placeholder"]
        values = {node: node.meta.get("val") for node in places}
        self._first_tensor = next(node for node, value in values.items() if isinstance(value, Tensor))
        self._known = {str(value): node for node, value in values.items() if isinstance(value, torch.SymInt)}
        self.saved: list[Node] = []

    def of(self, x: Node) -> list[Node]:
        """Placeholders in backward for the sizes of the forward's x."""
        sizes = [(axis, size) for axis, size in enumerate(x.meta["val"].shape) if isinstance(size, torch.SymInt)]
        for axis, size in sizes:
            if str(size) not in self._known:
                self._known[str(size)] = self._crossing(x, axis, size)
        return list({str(size): self._known[str(size)] for _, size in sizes}.values())

    def _crossing(self, x: Node, axis: int, size: torch.SymInt) -> Node:
        with self._forward.inserting_before(_behind(x)):
            made = self._forward.call_function(torch.ops.aten.sym_size.int, (x, axis))
        made.meta["val"] = size
        self.saved.append(made)
        # AOTAutograd wants the sizes before the tensors
        with self._backward.inserting_before(self._first_tensor):
            place = self._backward.placeholder(f"{x.name}_size_{axis}")
        place.meta["val"] = size
        return place


def _trace(function: Callable[..., tuple[Tensor, ...]], values: Sequence[Any]) -> GraphModule:
    traced = functional(function, values)
    for node in traced.graph.nodes:
        # the annotation is a string here, and then torch 2.11 does not cache a graph that calls this one
        node.type = None
    return with_transfers(traced)
