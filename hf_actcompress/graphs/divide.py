"""A joint graph becomes the graphs of forward and backward, without the calls that straight-line code does not need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt
from torch.fx import Graph, GraphModule, Node

from ..compilation.policy import CODEC, draws_or_writes, is_view, numel
from ..private_apis.graphs import divided
from .batch_norms import compute_once, updates_statistics
from .fewer_views import fewer_views
from .fused import fuse
from .kept_parts import keep_parts
from .opaque_inputs import give_again
from .redraw import state_before
from .routing import keep_no_routed_products
from .rules import tag
from .scales import move_scales
from .trace import Joint, NotTraced

aten = torch.ops.aten
_SLICES = frozenset({aten.slice.Tensor, aten.slice_backward.default})


@dataclass
class Halves:
    """What a joint graph was divided into.

    Attributes:
        forward, backward: The graphs.
        outputs: The nodes that the forward returns to the caller.
        kept: The nodes whose tensors are kept for backward. Inputs are among them; views of inputs are not.
        sizes: The nodes whose integers are kept.
        read: By the placeholder of the backward: the kept node that it reads.
        tangents: By the placeholder of the backward: the place of the output whose gradient it is.
        grads: What the backward returns for each input.
    """

    forward: GraphModule
    backward: GraphModule
    outputs: list[Node]
    kept: list[Node]
    sizes: list[Node]
    read: dict[Node, Node]
    tangents: dict[Node, int]
    grads: list[Node | None]

    @property
    def inputs(self) -> list[Node]:
        """The placeholders of the forward."""
        return [node for node in self.forward.graph.nodes if node.op == "placeholder"]


def divide(joint: Joint) -> Halves:
    """Divide a joint graph, which is changed."""
    updates = sum(map(updates_statistics, joint.graph.nodes))
    keep_no_routed_products(joint.graph, joint.outputs)
    tag(joint)
    give_again(joint)
    joint.module.recompile()
    forward, backward = divided(joint.module, [*joint.inputs, *joint.tangents], joint.mode, joint.outputs)
    compute_once(forward.graph)
    _keep_bases(forward, backward, joint.outputs)
    keep_parts(forward, backward, joint.outputs, {x.name for x in joint.placeholders[: joint.parameters]})
    named = [(x.name, x.meta.get(CODEC)) for x in _results(forward)[joint.outputs :]]
    for module in (forward, backward):
        tidy(module)
    fuse(backward.graph)
    if sum(map(updates_statistics, forward.graph.nodes)) != updates:
        raise NotTraced("a BatchNorm in it is called in a way that plans do not know")
    for module in (forward, backward):
        move_scales(module.graph)
        fewer_views(module.graph)
    returned = list(_results(forward))
    # tidied, two kept nodes may be one
    now = {}
    for (name, mark), x in zip(named, returned[joint.outputs :], strict=True):
        now[name] = x
        if mark is not None:
            x.meta.setdefault(CODEC, mark)
    _read_once(backward.graph, now)
    given = [node for node in backward.graph.nodes if node.op == "placeholder"]
    kept = list(dict.fromkeys(returned[joint.outputs :]))
    return Halves(
        forward,
        backward,
        returned[: joint.outputs],
        [x for x in kept if not _is_size(x)],
        [x for x in kept if _is_size(x)],
        {node: now[node.name] for node in given if node.name in now},
        {node: int(node.name.rpartition("_")[2]) - 1 for node in given if node.name not in now},
        list(_results(backward)),
    )


def _read_once(graph: Graph, kept: dict[str, Node]) -> None:
    """Let one placeholder read what several placeholders would read."""
    first: dict[Node, Node] = {}
    for node in [node for node in graph.nodes if node.op == "placeholder" and node.name in kept]:
        same = first.setdefault(kept[node.name], node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _results(module: GraphModule) -> tuple[Node, ...]:
    output = next(node for node in reversed(module.graph.nodes) if node.op == "output")
    return output.args[0]  # type: ignore[return-value, no-any-return]


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (SymInt, int))


def _keep_bases(forward: GraphModule, backward: GraphModule, outputs: int) -> None:
    """Keep an input in the place of a view of it: autograd notices then that it was written on in the meantime. Of
    several views of all of a tensor keep one, which a codec packs once.
    """
    output = next(node for node in reversed(forward.graph.nodes) if node.op == "output")
    returned = list(output.args[0])  # type: ignore[arg-type]
    read = {node.name: node for node in backward.graph.nodes if node.op == "placeholder"}
    chains = [_chain(x) for x in returned[outputs:]]
    bases = [base for base, _ in chains]
    for place, (x, (base, chain)) in enumerate(zip(returned[outputs:], chains, strict=True), outputs):
        alone = bases.count(base) == 1 or _is_size(base) or numel(base.meta["val"]) != numel(x.meta["val"])
        if base is x or x.name not in read or (base.op != "placeholder" and alone):
            continue
        _view_in_backward(backward.graph, read, x, base, chain)
        returned[place] = base
    output.args = (tuple([*returned[:outputs], *dict.fromkeys(returned[outputs:])]),)


def _chain(x: Node) -> tuple[Node, list[Node]]:
    """What x is a view of, and the nodes that make x of it, in order."""
    chain: list[Node] = []
    while x.op == "call_function" and is_view(x) and len(x.all_input_nodes) == 1:
        chain.insert(0, x)
        x = x.all_input_nodes[0]
    return x, chain


def _view_in_backward(graph: Graph, read: dict[str, Node], x: Node, base: Node, chain: list[Node]) -> None:
    """Let a backward read `base` in the place of its view x."""
    old = read.pop(x.name)
    if base.name not in read:
        with graph.inserting_before(old):
            read[base.name] = graph.placeholder(base.name)
        read[base.name].meta = dict(base.meta)
    value, order = read[base.name], {node: i for i, node in enumerate(graph.nodes)}
    first = min(old.users, key=order.__getitem__)
    for node in chain:
        with graph.inserting_before(first):
            value = graph.node_copy(node, lambda _, value=value: value)  # type: ignore[misc]
    old.replace_all_uses_with(value)
    graph.erase_node(old)


def tidy(module: GraphModule) -> None:
    """Remove views of the same shape, what is undone at once, and calls that are there already. Two draws
    are never one.
    """
    graph, changed = module.graph, True
    while changed:
        seen: dict[Any, Node] = {}
        changed = False
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            same = _same(node)
            alone = draws_or_writes(node) or node.target is state_before or updates_statistics(node)
            if same is None and not alone:
                same = seen.setdefault((node.target, str(node.args), str(node.kwargs)), node)
            if same is not None and same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)
                changed = True
    for node in graph.nodes:
        source = node.args[0] if node.args else None
        if node.target is aten.view.default and isinstance(source, Node) and source.target is aten.view.default:
            node.args = (source.args[0], node.args[1])
    graph.eliminate_dead_code()
    module.recompile()


def _same(node: Node) -> Node | None:
    """An earlier node with the same value and strides; None if it is not known."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    target, args = node.target, node.args[1:]
    if target is aten.view.default and _shape(node) == _shape(source):
        return source
    # a slice that leaves nothing out, of which a trace with symbols for sizes has many
    if target in _SLICES and _shape(node) == _shape(source) and _strides(node) == _strides(source):
        return source
    if target is aten.t.default and source.target is target:
        return source.args[0]  # type: ignore[return-value]
    if target is aten.transpose.int and source.target is target and set(args) == set(source.args[1:]):
        return source.args[0]  # type: ignore[return-value]
    if target is aten.pow.Tensor_Scalar and args[0] == 1.0:
        return source
    return None


def _shape(node: Node) -> str:
    return str(tuple(node.meta["val"].shape))


def _strides(node: Node) -> str:
    return str(node.meta["val"].stride())
