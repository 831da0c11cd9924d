"""Takes the padding out of products around the logits, so that the logits can be computed in pieces.

For a CUDA device Inductor pads the factors of a product whose sizes are no multiples of 8, if that is faster, as with
BERT's vocabulary of 30,522 and GPT-2's of 50,257. The padded products read and write other tensors than the logits and
their gradient. Pieces have widths that need no padding, except the last one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from .ordering import call

aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.addmm.default)


def without_padding(graph: Graph, logits: Node) -> None:
    """Make the logits, and the products that read their gradient, without padding.

    Args:
        graph: The backward graph; it is changed in place.
        logits: The product that makes them, perhaps padded.
    """
    logits = _unpadded(graph, logits)
    columns = logits.meta["val"].shape[1]
    for node in list(graph.nodes):
        # a size that is a symbol is not padded; comparing it with a number would be a guard of the graph
        if node.target in _PRODUCTS and any(type(size) is int and size == columns for size in _sizes(node)):
            _unpadded(graph, node)


def _sizes(product: Node) -> tuple[Any, Any, Any]:
    """Rows, inner size and columns without the padding."""
    left, right = map(_plain, product.args[-2:])  # type: ignore[arg-type]
    return (*left.meta["val"].shape, right.meta["val"].shape[1])


def _plain(x: Node) -> Node:
    """What x is padded from, behind its last row and column; x itself if it is not padded."""
    if x.target is not aten.constant_pad_nd.default or x.args[2:] not in ((), (0,), (0.0,)):
        return x
    source, pads = x.args[:2]
    assert isinstance(source, Node) and isinstance(pads, (list, tuple))
    return x if any(pads[::2]) else source


def _unpadded(graph: Graph, product: Node) -> Node:
    *bias, left, right = product.args
    plain = [*map(_plain, (left, right))]  # type: ignore[arg-type]
    shape = (plain[0].meta["val"].shape[0], plain[1].meta["val"].shape[1])
    result = product
    while str(tuple(result.meta["val"].shape)) != str(shape):
        users = list(result.users)
        if len(users) != 1 or users[0].target is not aten.slice.Tensor:
            return product
        result = users[0]
    if plain == [left, right]:
        return product
    mode = product.meta["val"].fake_mode
    with graph.inserting_before(product):
        cut = [call(graph, mode, aten.slice.Tensor, x, x.meta["val"].dim() - 1, 0, shape[1]) for x in bias]  # type: ignore[union-attr]
        new = call(graph, mode, product.target, *cut, *plain, **product.kwargs)
    new.meta = {**product.meta, "val": new.meta["val"]}
    result.replace_all_uses_with(new)
    return new
