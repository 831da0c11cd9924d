"""Which nodes of a layer's joint graph are kept: the compiler's policy, and rules for graphs that no compiler fuses."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection
from typing import Any, TypeGuard

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from ..compilation.attribution import running
from ..compilation.policy import (
    CODEC,
    apply_policy,
    hint,
    is_pointwise,
    is_reduction,
    is_statistic,
    is_view,
    made_by,
    nbytes,
    numel,
    of_forward,
    tag_recompute,
)
from ..ops.opaque import LINEAR
from ..ops.traced_tiles import TILED
from .batch_norms import recompute_outputs
from .draws import DROPPED
from .redraw import drawn_from, is_drawn, state_before
from .trace import Joint

aten = torch.ops.aten
# how many features a product makes at least of each that it reads, if it is cheap to recompute, and by how much its
# matrix is smaller than the layer's largest one
_FEW = 8
# how many sums of one kind in a module are a loop
_MANY = 16
# norms that return their statistics behind their result
NORMS = {aten.native_layer_norm.default, aten.native_group_norm.default}
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}


def tag(joint: Joint) -> None:
    """Tag each node of the forward for torch's partitioner: keep it, or recompute it."""
    graph = joint.graph
    apply_policy(graph, joint.outputs)
    forward = of_forward(graph, joint.outputs)
    weights = made_of_these(graph, joint.placeholders[: joint.parameters])
    largest = max(map(_factor, forward), default=0)
    for node in graph.nodes:
        if node in forward:
            _tag(node, weights, largest, joint.selective)
    for node in _in_loops(forward) if joint.selective else ():
        tag_recompute(node)
    for node in graph.nodes:
        if node in forward and _is_marked(node) and _shows_a_marked_one(node, weights):
            del node.meta[CODEC]
            tag_recompute(node)
    for node in graph.nodes:
        if is_drawn(node) or node.target is state_before:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for node in graph.nodes:
        if node in forward and is_recomputed(node) and _is_last(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    recompute_outputs(graph, forward)
    for node in graph.nodes:
        if node in forward and node.target in NORMS and not feeds_backward(_result(node), forward):
            # the norm need not run again for its statistics alone
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _is_marked(node: Node) -> bool:
    """Whether a module keeps a value through a codec."""
    return CODEC in node.meta and node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE


def _shows_a_marked_one(node: Node, weights: set[Node]) -> bool:
    """Whether a value is a pointwise function of one that is kept through a codec, and of weights. So is the output of
    an activation: a norm that reads it needs no copy of its own."""
    sources = {made_by(x) for x in node.all_input_nodes if x not in weights}
    return is_pointwise(node) and len(sources) == 1 and all(map(_is_marked, sources))


def _in_loops(forward: set[Node]) -> list[Node]:
    """The sums that one module makes many of, as linear attention does for each token of a chunk. Each of them is
    small, and all together are not."""
    small = [x for x in forward if "recompute" not in x.meta and is_reduction(x) and is_statistic(x)]
    counts = Counter((running(x), x.target) for x in small)
    return [x for x in small if counts[running(x), x.target] >= _MANY]


def is_recomputed(node: Node) -> bool:
    """Whether a tagged node is recomputed in backward."""
    return bool(node.meta.get("recompute") == CheckpointPolicy.PREFER_RECOMPUTE)


def _result(node: Node) -> Node | None:
    return next((x for x in node.users if x.target is operator.getitem and x.args[1] == 0), None)


def feeds_backward(x: Node | None, forward: set[Node], but: Any = None) -> bool:
    """Whether a backward reads a value, or what is recomputed from it: a node of another target than `but`."""
    pending, seen = [x] if x is not None else [], set[Node]()
    while pending:
        node = pending.pop()
        for user in node.users:
            if user.op == "call_function" and user.target is not but and user not in seen:
                seen.add(user)
                if user not in forward:
                    return True
                pending += [user] if is_recomputed(user) else []
    return False


def _is_last(node: Node) -> bool:
    """Whether to keep a node in the place of the products and embeddings that it is made of: rotated queries, a sum.

    Nobody else may read these. The products must have no fewer bytes, or the products and embeddings together more.
    """
    if is_view(node) or node.target is DROPPED or CODEC in node.meta:
        return False
    made, products, embeddings, pending = {node}, 0, 0, set(node.all_input_nodes)
    x = node
    # from the last node to the first one, so that all readers of a node come before it
    while pending:
        x = x.prev
        if x not in pending:
            continue
        pending.remove(x)
        if CODEC in x.meta:
            # a module has marked it
            return False
        if x.op == "call_function" and all(user in made for user in x.users):
            if is_recomputed(x):
                made.add(x)
                pending.update(x.all_input_nodes)
            elif _is_product(x):
                products += nbytes(x)
            elif x.target is aten.embedding.default:
                embeddings += nbytes(x)
    return products >= nbytes(node) > 0 or products + embeddings > nbytes(node) > 0


def _tag(node: Node, weights: set[Node], largest: int, selective: bool) -> None:
    cheap = is_view(node) or _is_depthwise(node) or _is_cheap_product(node, weights, largest, selective)
    if cheap or node.target in (DROPPED, drawn_from):
        tag_recompute(node)
    elif node.target is aten.native_layer_norm.default and _is_sum(x := node.args[0]) and _is_narrow(x):
        # what a norm reads is kept, and not its two summands
        x.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # type: ignore[union-attr]
    elif _adds_products(node):
        # of a base layer's and an adapter's product the sum is kept, as it is cast
        _narrowest(node).meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _is_cheap_product(node: Node, weights: set[Node], largest: int, selective: bool) -> bool:
    """Whether a product is cheap to recompute for what it has in bytes.

    That is one of activations, such as the scores of eager attention or a solution in linear attention; one that makes
    many features of a few, as the second one of an adapter does; and a weight of an adapter that is larger than its two
    factors together.
    """
    if node.target not in PRODUCTS and node.target is not aten.linalg_solve_triangular.default:
        return False
    made = [x in weights for x in node.all_input_nodes]
    if not any(made):
        return selective
    return _is_of_few(node, largest) or (all(made) and _is_of_low_rank(node))


def _is_of_few(product: Node, largest: int) -> bool:
    matrix = _matrix(product).meta["val"]
    few = matrix.dim() == 2 and hint(matrix.size(0)) * _FEW <= hint(matrix.size(1))
    return few and numel(matrix) * _FEW <= largest


def _factor(node: Node) -> int:
    """How many elements the matrix has that a product reads; 0 for other nodes."""
    if node.target is LINEAR:
        tensors: Any = node.args[0]
        features: Any = node.args[3]
        return hint(tensors[0].meta["val"].size(-1)) * int(features)
    return numel(_matrix(node).meta["val"]) if node.target in PRODUCTS else 0


def _is_product(x: Node) -> bool:
    """Whether a node is a product, also one that no tracer sees into."""
    if x.target is operator.getitem and x.args[1] == 0:
        return x.args[0].target is LINEAR  # type: ignore[union-attr]
    return x.target in PRODUCTS or x.target is TILED


def _matrix(product: Node) -> Node:
    return product.all_input_nodes[-1]


def _is_of_low_rank(product: Node) -> bool:
    first, second = (numel(x.meta["val"]) for x in product.args[-2:])  # type: ignore[union-attr]
    return first + second < numel(product.meta["val"])


def _is_depthwise(node: Node) -> bool:
    """Whether a convolution reads one channel for each that it makes, which costs no more than a few pointwise ops."""
    return node.target is aten.convolution.default and node.args[1].meta["val"].size(1) == 1  # type: ignore[union-attr]


def _is_sum(node: Any) -> TypeGuard[Node]:
    return isinstance(node, Node) and node.target is aten.add.Tensor


def _is_narrow(node: Node) -> bool:
    """Whether a sum is no wider than its summands. Under autocast one of them has half its width."""
    return all(_width(x) >= _width(node) for x in node.all_input_nodes)


def made_of_these(graph: Graph, given: Collection[Node]) -> set[Node]:
    """The placeholders that are given, and the calls that read nothing but these and what is made of them."""
    made = set(given)
    for node in graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and made.issuperset(node.all_input_nodes):
            made.add(node)
    return made


def _adds_products(node: Node) -> bool:
    """Whether a node is the sum of two products that do not both run again in backward."""
    products = [_product_in(x) for x in node.all_input_nodes] if _is_sum(node) else []
    if len(set(products)) < 2:
        return False
    return None not in products and not all(is_recomputed(x) for x in products if x is not None)


def _product_in(x: Node) -> Node | None:
    """The product that x is, perhaps scaled, copied, cast or seen otherwise; None if it is something else."""
    scaled = {aten._to_copy.default, aten.clone.default, aten.mul.Tensor}
    while x.op == "call_function" and (is_view(x) or (x.target in scaled and len(x.all_input_nodes) == 1)):
        x = x.all_input_nodes[0]
    return x if x.op == "call_function" and _is_product(x) else None


def _narrowest(node: Node) -> Node:
    """The node, or what it is cast to if nobody else reads it and the cast has fewer bytes."""
    while len(node.users) == 1:
        user = next(iter(node.users))
        if user.target is not aten._to_copy.default or _width(user) >= _width(node):
            break
        node = user
    return node


def _width(node: Node) -> int:
    return int(node.meta["val"].element_size())
