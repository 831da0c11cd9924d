"""What a compiled graph keeps between forward and backward: the same tensors as the eager ops.

torch's partitioner looks for the cheapest set of tensors to keep, but it never computes the input of a product again:
the output of a norm, an activation or a dropout. Here every node that is pointwise, a view or a large reduction gets
the tag to be recomputed. The inputs of norms and activations, which the modules have marked, get the tag to be
kept.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from ..private_apis import partitioner_ops
from .marks import KEEP, PLAIN, RECOMPUTE

_MARK = torch.ops.hf_actcompress.mark.default
# key in `node.meta`: the name of the codec through which the value is kept
CODEC = "actcompress_codec"
# key in `node.meta` of a product that is recomputed because its result is large (the logits)
LOGITS = "actcompress_logits"
# the id of our region of recomputation. It is larger than those of checkpointed regions, so that torch keeps a tensor
# that leaves such a region for one of our nodes, as in eager mode
_REGION = 2**30
# a reduction is recomputed if it shrinks its input by less than this factor; statistics of norms are smaller
_LARGE = 16
# ops that are pointwise, reductions or compositions of these, and are missing in torch's own list
_CHEAP = {
    "_fused_rms_norm", "_log_softmax", "_prelu_kernel", "_safe_softmax", "_softmax", "_weight_norm_interface",
    "avg_pool2d", "cat", "constant_pad_nd", "copy", "cumsum", "empty", "flip", "glu", "grid_sampler_2d", "hardswish",
    "index_copy", "index_put", "inductor_random", "log_sigmoid_forward", "max_pool2d_with_indices",
    "native_group_norm", "native_layer_norm", "repeat", "roll", "scatter", "select_scatter", "slice_scatter", "stack",
    "tril", "triu", "upsample_nearest2d",
}  # fmt: skip
# ops that compilers fuse as pointwise ones, although they have no tag
_FUSED = {"cat", "constant_pad_nd", "convert_element_type", "inductor_random", "embedding", "expand", "iota", "full"}
_REDUCTIONS = {
    "all", "amax", "amin", "any", "argmax", "argmin", "gather", "index", "logsumexp", "max", "mean", "min", "prod",
    "sum", "var", "var_mean",
}  # fmt: skip
# ops that write into their first argument
_UPDATES = {
    "_unsafe_index_put", "_unsafe_masked_index_put_accumulate", "index_add", "index_copy", "index_put", "scatter",
    "scatter_add", "select_scatter", "slice_scatter",
}  # fmt: skip


def has_marks(graph: Graph) -> bool:
    """Whether this is the graph of a patched model: whether it has marks."""
    return any(node.target is _MARK for node in graph.nodes)


def apply_policy(graph: Graph, outputs: int) -> None:
    """Remove the marks, and tag each node of the forward for torch's partitioner: recompute it, or keep it.

    Args:
        graph: The joint graph; it is changed in place.
        outputs: How many of the first outputs are the forward's. Nodes that only backward needs, such as codes that an
            op makes to keep, get no tag: torch keeps the smallest set of them.
    """
    held = held_by_caller(graph, outputs)
    for node in graph.nodes:
        if node.target is torch.ops.aten._unsafe_view.default:
            # the same in a graph without autograd, but the partitioner computes only views again
            node.target = torch.ops.aten.view.default
    for node in list(graph.nodes):
        if node.target is _MARK:
            _take_out(graph, node, held)
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.native_dropout.default:
            _scale_by_mask(graph, node)
    for node in of_forward(graph, outputs):
        if "recompute" not in node.meta and is_cheap(node):
            tag_recompute(node)


def held_by_caller(graph: Graph, outputs: int) -> set[Node]:
    """The inputs that need no gradient, such as pixels: the caller holds them in any case. An input with a gradient
    comes from a graph before this one, and is freed unless this graph keeps it."""
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    gradients = output.args[0][outputs:]  # type: ignore[index]
    inputs = (node for node in graph.nodes if node.op == "placeholder")
    # the placeholders after these inputs are the gradients of the outputs; `zip` ends before them
    return {node for node, gradient in zip(inputs, gradients, strict=False) if gradient is None}


def _take_out(graph: Graph, mark: Node, held: set[Node]) -> None:
    x, wish, codec, kept = mark.args
    assert isinstance(x, Node) and isinstance(kept, int)
    made = made_by(x)
    returned_as_it_is = wish == RECOMPUTE and _is_fresh(x)
    if wish == RECOMPUTE and _bytes(x) <= kept:
        wish = KEEP
    # a tag that checkpointing has set stays
    if wish == RECOMPUTE:
        made = made.all_input_nodes[0] if made.target is operator.getitem else made
        if "recompute" not in made.meta:
            tag_recompute(made)
            made.meta[LOGITS] = True
    else:
        while made.target is torch.ops.aten.clone.default:
            # attention's output in another order in memory: the source is kept, and backward copies it again
            made = made_by(made.all_input_nodes[0])
        if wish == KEEP:
            made.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
        if codec != PLAIN and made not in held and not (wish != KEEP and CODEC in made.meta):
            made.meta[CODEC] = codec
    if any(user.op == "output" for user in mark.users) and not returned_as_it_is:
        # a graph must not return a tensor twice, nor its own input, nor a tensor that it also keeps through a codec
        with graph.inserting_before(mark):
            copy = graph.call_function(torch.ops.aten.clone.default, (x,))
        copy.meta = dict(mark.meta)
        mark.replace_all_uses_with(copy, delete_user_cb=lambda user: user.op == "output")
    mark.replace_all_uses_with(x)
    graph.erase_node(mark)


def _bytes(x: Node) -> float:
    """Infinitely many in a graph for any sizes."""
    value = x.meta["val"]
    return value.nbytes if all(type(size) is int for size in value.shape) else math.inf


def _is_fresh(x: Node) -> bool:
    """Whether the graph computes x and returns no view of it."""
    pending = [made_by(x)]
    if pending[0].op == "placeholder":
        return False
    while pending:
        for user in pending.pop().users:
            if user.op == "output":
                return False
            if is_view(user):
                pending.append(user)
    return True


def _scale_by_mask(graph: Graph, dropout: Node) -> None:
    """Compute dropout's result from its input and its mask, with the same values, so that only the mask is kept."""
    x, p, train = dropout.args
    results = [node for node in dropout.users if node.args[1] == 0]
    masks = [node for node in dropout.users if node.args[1] == 1]
    if not (train and results and masks and isinstance(p, float) and p < 1):
        return
    mul, value = torch.ops.aten.mul.Tensor, results[0].meta["val"]
    scale = 1 / (1 - p)
    with graph.inserting_before(max(results + masks).next):
        if value.device.type == "cpu":
            # torch's op for a CPU rounds the scale to x's dtype
            noise = graph.call_function(torch.ops.aten._to_copy.default, (masks[0],), {"dtype": value.dtype})
            scaled = graph.call_function(mul, (noise, scale))
            new = [noise, scaled, graph.call_function(mul, (x, scaled))]
        else:
            masked = graph.call_function(mul, (x, masks[0]))
            new = [masked, graph.call_function(mul, (masked, scale))]
    checkpointing: dict[str, Any] = {
        name: dropout.meta[name] for name in ("recompute", "ac_graph_id") if name in dropout.meta
    }
    for node in new:
        node.meta = {"val": value, **checkpointing}
    for result in results:
        result.replace_all_uses_with(new[-1])


def tag_recompute(node: Node) -> None:
    """Tag a node to be recomputed in backward, unless torch's partitioner finds a reason to keep it."""
    node.meta["recompute"], node.meta["ac_graph_id"] = CheckpointPolicy.PREFER_RECOMPUTE, _REGION


def made_by(x: Node) -> Node:
    """The node that computes the tensor that x is a view of."""
    while x.op == "call_function" and is_view(x):
        x = x.all_input_nodes[0]
    return x


def is_view(node: Node) -> bool:
    """Whether a node computes nothing and shows the memory of its input."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and source.op == "call_function" and is_view(source)
    return _shows_its_input(node.target)


@cache
def _shows_its_input(target: Any) -> bool:
    """Whether an op returns its input's memory, by its schema, and does not write on it."""
    schema = getattr(target, "_schema", None)
    return schema is not None and not schema.is_mutable and any(x.alias_info is not None for x in schema.returns)


def of_forward(graph: Graph, outputs: int) -> set[Node]:
    """The calls that the forward's outputs depend on."""
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    results = [node for node in output.args[0][:outputs] if isinstance(node, Node)]  # type: ignore[index]
    return {node for node in made_of(results) if node.op == "call_function"}


def made_of(results: Iterable[Node], ends: Callable[[Node], bool] = lambda node: False) -> set[Node]:
    """The results, and all nodes that they are made of. Behind a node for which `ends` holds, none is looked for."""
    found: set[Node] = set()
    new = list(results)
    while new:
        node = new.pop()
        if node not in found:
            found.add(node)
            new.extend([] if ends(node) else node.all_input_nodes)
    return found


def is_fused(node: Node) -> bool:
    """Whether a compiler keeps the result in registers: a pointwise op that only pointwise ops and reductions read."""
    return is_pointwise(node) and all(_reads_in_registers(user) for user in node.users)


def _reads_in_registers(node: Node) -> bool:
    if is_view(node):
        return all(_reads_in_registers(user) for user in node.users)
    return is_reduction(node) or (node.op == "call_function" and is_pointwise(node))


def overwrites(node: Node) -> bool:
    """Whether a compiler may write the result over an argument of the same size."""
    return is_pointwise(node) or op_name(node) in _UPDATES


def is_pointwise(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or op_name(node) in _FUSED


def is_cheap(node: Node) -> bool:
    """Whether a node is pointwise or a large reduction, so that backward computes it again in place of keeping it."""
    if node.target is operator.getitem or draws_or_writes(node):
        return False
    packet, ops = getattr(node.target, "overloadpacket", node.target), partitioner_ops()
    if packet in ops.compute_intensive_ops or packet in ops.random_ops or is_view(node):
        return False
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    if not (pointwise or packet in ops.recomputable_ops or op_name(node) in _CHEAP):
        return False
    return pointwise or not is_statistic(node)


def draws_or_writes(node: Node) -> bool:
    """Whether a second run would draw other random numbers, or write a second time."""
    schema = getattr(node.target, "_schema", None)
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or (schema is not None and schema.is_mutable)


def is_reduction(node: Node) -> bool:
    """Whether a node makes a sum, a mean, a maximum or the like."""
    return node.op == "call_function" and op_name(node) in _REDUCTIONS


def is_statistic(node: Node) -> bool:
    """Whether the result is much smaller than the inputs: cheap to keep, and expensive to recompute."""
    sizes = [numel(x) for source in node.all_input_nodes for x in _results(source)]
    return bool(sizes) and sum(map(numel, _results(node))) * _LARGE <= max(sizes)


def _results(node: Node) -> list[torch.Tensor]:
    value: Any = node.meta.get("val")
    return [x for x in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(x, torch.Tensor)]


def is_attention(node: Node) -> bool:
    """Whether a node is a fused attention."""
    return "attention" in str(node.target)


def nbytes(node: Node) -> int:
    """Bytes of a node's result."""
    return sum(numel(x) * x.dtype.itemsize for x in _results(node))


def numel(x: torch.Tensor) -> int:
    return hint(x.numel())


def hint(size: Any) -> int:
    """A size's value when the graph was traced. Reading the symbol itself would make it a constant of the graph."""
    node = getattr(size, "node", None)
    return int(size if node is None else node.hint or 0)


def op_name(node: Node) -> str:
    """The name of the op that a node calls, without its overload."""
    packet: Any = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet)).split(".")[-1]
